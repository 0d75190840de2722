"""What the source may not contain: calls that run, unpickle or unpack what comes from elsewhere, by whatever name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[1]
NAMES = """
    eval exec compile __import__ importlib.import_module runpy.run_path runpy.run_module code.interact
    os.system os.popen subprocess.getoutput subprocess.getstatusoutput asyncio.create_subprocess_shell
    pickle.load pickle.loads marshal.load marshal.loads shutil.unpack_archive tempfile.mktemp
    ssl._create_unverified_context hashlib.md5 hashlib.sha1
    torch.hub.load torch.hub.load_state_dict_from_url torch.utils.model_zoo.load_url torch.jit.load torch.export.load
    torch.package.PackageImporter torch.ops.load_library torch.classes.load_library torch.utils.cpp_extension.load
    torch.utils.cpp_extension.load_inline pandas.read_pickle torch.distributed.checkpoint.load_state_dict
    torch.distributed.all_gather_object torch.distributed.gather_object torch.distributed.broadcast_object_list
    torch.distributed.scatter_object_list torch.distributed.recv_object_list
"""
FORBIDDEN = {*NAMES.split()}
# Allowed as a call with the right arguments, and in no other way.
CAREFUL = {
    "torch.load": lambda given: given.get("weights_only") == "True",
    "numpy.load": lambda given: given.get("allow_pickle") == "False",
    "torch.distributed.checkpoint.load": lambda given: {"storage_reader", "planner"} <= given.keys(),
}
MODULES = {"marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "ftplib", "telnetlib", "xml"}
RUNNERS = {f"subprocess.{each}" for each in ("run", "Popen", "call", "check_call", "check_output")}
USUAL = {"np": "numpy", "pd": "pandas", "dcp": "torch.distributed.checkpoint", "dist": "torch.distributed"}
# The same things at other places.
SAME = (
    (r"^(_pickle|cPickle|torch\.serialization\.pickle)\b", "pickle"),
    (r"^(posix|nt)\.", "os."),
    (r"^(builtins|__builtins__)\.", ""),
    (r"^importlib\.__import__$", "__import__"),
    (r"^torch\.serialization\.", "torch."),
    (r"^torch\.distributed\.distributed_c10d\.", "torch.distributed."),
    (r"^torch\.distributed\.checkpoint\.state_dict_loader\.", "torch.distributed.checkpoint."),
    (r"^pandas\.io\.pickle\.", "pandas."),
    (r"^numpy\.lib\.(npyio|_npyio_impl)\.", "numpy."),
    (r"^asyncio\.subprocess\.", "asyncio."),
)


def canonical(name: str) -> str:
    for pattern, plain in SAME:
        name = re.sub(pattern, plain, name)
    return name


class Scan:
    """A module's names, resolved through its imports and assignments to where they come from."""

    def __init__(self, source: str):
        self.tree, self.known = ast.parse(source), dict(USUAL)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for each in node.names:
                    self.known[each.asname or each.name.split(".")[0]] = (
                        each.name if each.asname else each.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                for each in node.names:
                    self.known[each.asname or each.name] = f"{'.' * node.level}{node.module or ''}.{each.name}"
        for _ in range(3):  # a name of a name of a name
            for node in ast.walk(self.tree):
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                    found = self.dotted(node.value)
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        if found in FORBIDDEN | CAREFUL.keys() and isinstance(target, ast.Name):
                            self.known[target.id] = found

    def dotted(self, node: ast.AST) -> str | None:
        """torch.load for t.load, load, getattr(torch, "load"), ...; None where it is no name."""
        if isinstance(node, ast.Name):
            return canonical(self.known.get(node.id, node.id))
        if isinstance(node, ast.Attribute):
            value = self.dotted(node.value)
            return None if value is None else canonical(f"{value}.{node.attr}")
        if isinstance(node, ast.Call) and self.dotted(node.func) == "getattr" and len(node.args) >= 2:
            value, name = self.dotted(node.args[0]), node.args[1]
            if value is not None and isinstance(name, ast.Constant):
                return canonical(f"{value}.{name.value}")
        return None

    def complaints(self) -> Iterator[str]:
        """What is forbidden of it."""
        fine: set[int] = set()  # references that are in order
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                if any(isinstance(each, ast.FunctionDef) and each.name == "find_class" for each in node.body):
                    fine |= {id(base) for base in node.bases}
            elif isinstance(node, ast.Call):
                given = {each.arg: ast.unparse(each.value) for each in node.keywords}
                name = self.dotted(node.func) or ast.unparse(node.func)
                if name in CAREFUL and CAREFUL[name](given):
                    fine.add(id(node.func))
                yield from _of_call(name, given, node.args)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from _of_import(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.match(r"http://(?!www\.w3\.org/|127\.0\.0\.1|localhost)", node.value):
                    yield f"plain http: {node.value}"
            elif id(node) not in fine and isinstance(node, ast.Name | ast.Attribute | ast.Call):
                if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                    continue
                name = self.dotted(node)
                if name in FORBIDDEN or name == "pickle.Unpickler" or (name or "").startswith(("os.exec", "os.spawn")):
                    yield f"line {node.lineno}: {name}"
                elif name in CAREFUL:
                    yield f"line {node.lineno}: {name} without what makes it safe"


def _of_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    names = [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if "*" in names:
            yield f"from {module} import *"
        yield from (name for name in (canonical(f"{module}.{each}") for each in names) if name in FORBIDDEN)
        names = [module]
    yield from (name for name in names if name.split(".")[0] in MODULES)


def _of_call(name: str, given: dict[str | None, str], args: list[ast.expr]) -> Iterator[str]:
    if name.rpartition(".")[2] in ("extractall", "extract") and "." in name:
        yield f"{name}: an archive decides where it writes"
    if given.get("shell", "False") != "False" or given.get("allow_pickle") == "True" or given.get("verify") == "False":
        yield f"{name}({given})"
    if name in RUNNERS and args and isinstance(args[0], ast.Constant | ast.JoinedStr):
        yield f"{name} of a string"


def complaints(source: str) -> list[str]:
    return list(Scan(source).complaints())


@pytest.mark.parametrize(
    "source",
    [
        "import pickle; pickle.load(f)", "import pickle; pickle.loads(b'')", "from pickle import loads", "import dill",
        "import pickle; pickle.Unpickler(f).load()", "class A(pickle.Unpickler): pass", "torch.load(path)",
        "torch.load(path, weights_only=False)", "np.load(p)", "np.load(p, allow_pickle=True)", "eval('1')", "exec(code)",
        "import yaml", "os.system('ls')", "os.popen('ls')", "from os import system", "subprocess.run('ls', shell=True)",
        "subprocess.run(f'ls {x}')", "tape.extractall(folder)", "book.extract(member)", "shutil.unpack_archive(a)",
        "tempfile.mktemp()", "url = 'http://example.org/data'", "dcp.load(state, checkpoint_id=path)",
        "requests.get(url, verify=False)", "hashlib.md5(b'')", "os.execv(a, b)",
    ],
)  # fmt: skip
def test_the_rules_find_what_they_forbid(source: str):
    assert complaints(source)


@pytest.mark.parametrize(
    "source",
    [
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
    ],
)  # fmt: skip
def test_the_rules_find_it_by_another_name(source: str):
    assert complaints(source)


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)", "model.eval()", "subprocess.run(['ls', x])", "re.compile('a')",
        "import torch as t; t.load(f, weights_only=True)", "from torch import load; load(f, weights_only=True)",
        "from json import load; load(f)", "import json; json.loads(s)", "optimizer.load_state_dict(s)",
        "from safetensors.torch import load; load(b)", "torch.compile(model)", "train(compile=True)", "config.compile",
        "dcp.load(s, storage_reader=r, planner=p)", "from pickle import UnpicklingError", "import importlib.resources",
        "import pickle as p\nclass R(p.Unpickler):\n    def find_class(self, m, n): ...",
    ],
)  # fmt: skip
def test_the_rules_allow_what_is_safe(source: str):
    assert complaints(source) == []


def python_of(text: str) -> str:
    """The python blocks of a page, one below the other."""
    blocks = re.findall(r"^( *)``` ?(?:python|\{ \.python \})\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return "\n".join(
        re.sub(f"^{indent}", "", body, flags=re.MULTILINE) for indent, body in blocks if "--8<--" not in body
    )


FILES = [path for top in ("src", "examples", "benchmarks", "docs") for path in sorted((ROOT / top).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# docs/security.md says why each of these is trusted.
TRUSTED = {
    "src/steadynorm/optim/sharding/consensus.py": "torch.distributed.all_gather_object",
    "src/steadynorm/__init__.py": "importlib.import_module",
    "src/steadynorm/cli/commands.py": "importlib.import_module",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_source_contains_nothing_forbidden(path: Path):
    found = complaints(path.read_text(encoding="utf-8"))
    if (trusted := TRUSTED.get(name_of(path))) is not None:
        assert any(complaint.endswith(trusted) for complaint in found)
        found = [complaint for complaint in found if not complaint.endswith(trusted)]
    assert found == []


def test_the_pages_show_nothing_forbidden():
    blocks = {path: python_of(path.read_text(encoding="utf-8")) for path in PAGES}
    assert sum(bool(each) for each in blocks.values()) > 5
    assert {name_of(path): found for path, each in blocks.items() if (found := complaints(each))} == {}


def test_all_of_the_source_is_looked_at():
    tops = {path.relative_to(ROOT).parts[0] for path in FILES}
    assert tops == {"src", "examples", "benchmarks", "docs"}
    assert len(FILES) > 120
    assert {*TRUSTED} <= {name_of(path) for path in FILES}


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
