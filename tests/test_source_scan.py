"""What the source may not contain: calls that run, unpickle or unpack foreign input, by whatever name.

Ruff does most of it: its S rules and the banned names in pyproject.toml. By hand is what it does not see.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parents[1]
RUNNERS = {f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output")}
PLAIN_HTTP = r"http://(?!www\.w3\.org/|127\.0\.0\.1|localhost)"
BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN = [
    "import pickle; pickle.load(f)", "import pickle; pickle.loads(b'')", "from pickle import loads", "import dill",
    "import pickle; pickle.Unpickler(f).load()", "class A(pickle.Unpickler): pass", "torch.load(path)",
    "torch.load(path, weights_only=False)", "np.load(p)", "np.load(p, allow_pickle=True)", "eval('1')", "exec(code)",
    "import yaml", "os.system('ls')", "os.popen('ls')", "from os import system", "subprocess.run('ls', shell=True)",
    "subprocess.run(f'ls {x}')", "tape.extractall(folder)", "book.extract(member)", "shutil.unpack_archive(a)",
    "tempfile.mktemp()", "url = 'http://example.org/data'", "dcp.load(state, checkpoint_id=path)",
    "requests.get(url, verify=False)", "hashlib.md5(b'')", "os.execv(a, b)",
    "import pickle as p; p.load(f)", "from pickle import load as read; read(f)", "import _pickle; _pickle.loads(b)",
    "from _pickle import Unpickler; Unpickler(f).load()", "from torch import load; load(f)",
    "import torch as t; t.load(f)", "import torch as t; t.serialization.load(f)", "import torch; torch.jit.load(f)",
    "from torch.serialization import load; load(f)", "from torch.jit import load; load(f)",
    "import os as o; o.system(c)", "from os import system as s; s(c)", "import posix; posix.system(c)",
    "from shutil import unpack_archive", "from importlib import import_module; import_module(n)",
    "import importlib as i; i.import_module(n)", "import pandas as pd; pd.read_pickle(f)",
    "from pandas import read_pickle as r; r(f)", "import asyncio; asyncio.create_subprocess_shell(c)",
    "from asyncio import create_subprocess_shell as c; c(x)", "from torch.distributed.checkpoint import load; load(s)",
    "import torch.distributed.checkpoint as d; d.load(s, checkpoint_id=p)",
    "from torch.distributed.checkpoint.state_dict_loader import load as r; r(s)",
    "import torch.distributed as d; d.all_gather_object(a, b)", "from numpy import load; load(f)",
    "import numpy as n; n.load(f)", "read = torch.load\nread(f)", "import pickle\nread = pickle.loads\nagain = read\nagain(b)",
    "list(map(eval, lines))", "from functools import partial; partial(torch.load, weights_only=True)",
    "getattr(os, 'system')(c)", "import builtins; builtins.eval(s)", "from pickle import *", "run = __import__",
    "import subprocess as s; s.run('ls', shell=True)", "from subprocess import run; run('ls')",
    "if (read := torch.load): read(f)", "def f():\n    from torch import load\n    return load(x)",
    "import xml.etree.ElementTree as E", "from torch.hub import load; load(x)", "torch.ops.load_library(p)",
]  # fmt: skip
SAFE = [
    "model.eval()", "subprocess.run(['ls', x])", "re.compile('a')",
    "from json import load; load(f)", "import json; json.loads(s)", "optimizer.load_state_dict(s)",
    "from safetensors.torch import load; load(b)", "torch.compile(model)", "train(compile=True)", "config.compile",
    "from pickle import UnpicklingError", "import importlib.resources",
]  # fmt: skip
# Who may use a banned name. docs/security.md says why each of these is trusted; S614 sees to weights_only=True.
TRUSTED = {
    "src/steadynorm/__init__.py": ["from importlib import import_module"],
    "src/steadynorm/cli/commands.py": ["from importlib import import_module"],
    "src/steadynorm/integrations/huggingface.py": ['torch.load(path, map_location="cpu", weights_only=True)'],
    "src/steadynorm/lab/train/checkpoint.py": [
        "torch.load(io.BytesIO((path / _STATE).read_bytes()), weights_only=True)"
    ],
    "src/steadynorm/lab/train/run_state.py": ["dcp.load(sharded, storage_reader=reader, planner=Planner(), "],
    "src/steadynorm/lab/train/safe_dcp.py": ["class _Index(pickle.Unpickler):", "torch.load(value, weights_only=True)"],
    "src/steadynorm/optim/sharding/consensus.py": ["dist.all_gather_object("],
}
FILES = [path for top in ("src", "examples", "benchmarks", "docs") for path in sorted((ROOT / top).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def complaints(source: str) -> Iterator[str]:
    """Yield what ruff does not see: runners of strings, archives, plain http, built-ins handed on."""
    tree = ast.parse(source)
    names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if (
                names.get(name, name) in RUNNERS
                and node.args
                and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
            ):
                yield f"line {node.lineno}: {name} of a string"
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("extract", "extractall"):
                yield f"line {node.lineno}: {name}: an archive decides where it writes"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in BUILTINS:
            yield f"line {node.lineno}: {node.id}"
        elif isinstance(node, ast.Constant) and re.match(PLAIN_HTTP, str(node.value)):
            yield f"line {node.lineno}: plain http: {node.value}"


def ruff(sources: dict[str, str], folder: Path) -> dict[str, list[str]]:
    """Return what the rules of pyproject.toml say about each of these sources, security and evasions only."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    rules = [
        "--config",
        str(ROOT / "pyproject.toml"),
        "--select",
        "S,TID251,B009,F403",
        "--ignore",
        "S101,S311,S603,S607",
    ]
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "json", *rules, str(folder)]
    finished = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=folder)
    assert finished.returncode in (0, 1), finished.stderr
    said: dict[str, list[str]] = {name: [] for name in sources}
    for complaint in json.loads(finished.stdout):
        said[Path(complaint["filename"]).stem].append(f"{complaint['code']}: {complaint['message']}")
    return said


IMPORTS = """import asyncio, hashlib, os, pickle, re, requests, shutil, subprocess, tempfile
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
"""


def test_rules_find_what_they_forbid_by_any_name(tmp_path):
    said = ruff({f"source{k}": IMPORTS + source for k, source in enumerate(FORBIDDEN)}, tmp_path)
    missed = [
        source
        for source, found in zip(FORBIDDEN, said.values(), strict=True)
        if not found and not [*complaints(source)]
    ]
    assert missed == []


def test_rules_allow_what_is_safe(tmp_path):
    said = ruff({f"source{k}": IMPORTS + source for k, source in enumerate(SAFE)}, tmp_path)
    assert [(source, found) for source, found in zip(SAFE, said.values(), strict=True) if found] == []
    assert [source for source in SAFE if [*complaints(source)]] == []


def python_of(text: str) -> str:
    """Return the Python blocks of a page, one below the other."""
    blocks = re.findall(r"^( *)``` ?(?:python|\{ \.python \})\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return "\n".join(
        re.sub(f"^{indent}", "", body, flags=re.MULTILINE) for indent, body in blocks if "--8<--" not in body
    )


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_source_contains_nothing_forbidden():
    """`make lint` runs ruff on all of it; this is the rest."""
    assert {name_of(path): said for path in FILES if (said := [*complaints(path.read_text(encoding="utf-8"))])} == {}


def test_banned_names_are_used_only_where_they_are_trusted():
    """No other line and no whole file is exempt from the rules."""
    exempt = {}
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert not any(re.match(r"# (ruff|flake8): noqa", line) for line in lines), name_of(path)
        if found := [line for line in lines if re.search(r"# noqa(?!: (?!S\d|TID))|# noqa: .*TID251", line)]:
            exempt[name_of(path)] = found
    assert {name: len(lines) for name, lines in exempt.items() if name in TRUSTED} == {
        k: len(v) for k, v in TRUSTED.items()
    }
    for name, expected in TRUSTED.items():
        assert all(text in line for text, line in zip(expected, exempt[name], strict=True)), name
    assert {name for name in exempt if name not in TRUSTED} <= {
        "src/steadynorm/lab/data/download.py"
    }  # S310: https only


def test_pages_show_nothing_forbidden(tmp_path):
    blocks = {f"page{k}": python_of(path.read_text(encoding="utf-8")) for k, path in enumerate(PAGES)}
    assert sum(bool(source) for source in blocks.values()) > 5
    said = ruff(blocks, tmp_path)
    assert {name_of(path): found for path, found in zip(PAGES, said.values(), strict=True) if found} == {}
    assert [source for source in blocks.values() if [*complaints(source)]] == []


def test_all_of_the_source_is_scanned():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == {"src", "examples", "benchmarks", "docs"}
    assert len(FILES) > 120


def without_encoding(source: str) -> list[str]:
    """Return the calls that read or write text in whatever encoding the locale has."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or {"encoding", "text"} & {each.arg for each in node.keywords} == {
            "encoding"
        }:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        arguments = [*node.args, *(each.value for each in node.keywords if each.arg == "mode")]
        binary = any("b" in each.value for each in ast.walk(ast.Tuple(arguments)) if _is_mode(each))
        if (
            (name == "read_text" and not node.args)
            or (name == "write_text" and len(node.args) == 1)
            or ((name == "fdopen" or (name == "open" and owner not in OPENERS)) and not binary)
            or any(each.arg in ("text", "universal_newlines") for each in node.keywords)
        ):
            found.append(ast.unparse(node))
    return found


OPENERS = {"os", "tarfile", "zipfile", "gzip", "bz2", "lzma", "Image"}  # binary, or file descriptors


def _is_mode(node: ast.AST) -> TypeGuard[ast.Constant]:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch("[rwaxbt+]+", node.value) is not None
    )


def test_files_without_an_encoding_are_found():
    bad = ["p.read_text()", "p.write_text(t)", "open(p)", "p.open('w')", "run(c, text=True)", "os.fdopen(2, 'w')"]
    good = ["p.read_text(encoding='utf-8')", "p.read_text('utf-8')", "p.open('rb')", "open(p, 'xb')", "os.open(p, 0)"]
    assert [source for source in bad if not without_encoding(source)] == []
    assert [source for source in good if without_encoding(source)] == []


def test_text_is_read_and_written_in_a_named_encoding():
    """A locale without UTF-8 reads the same files."""
    paths = [
        path
        for top in ("src", "tests", "examples", "benchmarks", "docs", "results")
        for path in (ROOT / top).rglob("*.py")
    ]
    found = {name_of(path): calls for path in paths if (calls := without_encoding(path.read_text(encoding="utf-8")))}
    assert found == {}
