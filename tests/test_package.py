"""The package as others get it: the cost of importing it, the content of the wheel, and a clean environment that
suffices.
"""

import os
import re
import signal
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import steadynorm
from steadynorm import extras
from steadynorm.cli import commands, main
from steadynorm.cli import train as training
from steadynorm.lmo import LMOS
from steadynorm.theory.updates import UPDATES

ROOT = Path(__file__).parents[1]
NEW_MODULES = """
import sys, numpy, torch
before = set(sys.modules)
import steadynorm
new = set(sys.modules) - before
print(*sorted(n for n in new if n.split(".")[0] not in sys.stdlib_module_names | {"steadynorm", "numpy"}))
"""
# What a user without any extra does.
FIRST_STEPS = """
import torch, steadynorm as sn
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
ours = sn.ScionC(sn.param_groups(model, output="2"))
theirs = sn.correct(torch.optim.AdamW(model.parameters(), weight_decay=0.1), skip=[model[2].weight])
monitor = sn.Monitor(ours, model)
for optimizer in (ours, theirs):
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
print(sn.__version__, len(monitor.measure()), round(sn.theory.steady_norm_sq(0.01, 0.08, 0.1, limit=True), 9))
"""


def python(code: str, program: str | Path = sys.executable) -> str:
    done = subprocess.run([program, "-c", code], capture_output=True, encoding="utf-8", timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_nothing_but_unchanged_torch_and_numpy():
    """It loads no torch._dynamo (seconds), no torch.distributed.tensor and none of the extras."""
    assert python(NEW_MODULES) == ""


COMMAND = """
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main({words!r})
"""
WITHOUT_TORCH = [
    "import steadynorm; dir(steadynorm); steadynorm.__version__",
    "from steadynorm import schedule; schedule.cosine(10)(3)",
    "import steadynorm.polar, steadynorm.groups.role_table, steadynorm.groups.tables; steadynorm.polar.METHODS",
    "from steadynorm import theory; theory.steady_norm_sq(0.01, 0.08, 0.1)",
    "import steadynorm.theory.updates, steadynorm.report.content, steadynorm.records, steadynorm.report.page",
    *(
        COMMAND.format(words=words.split())
        for words in (
            "--help",
            "predict --help",
            "predict --lr 0.01 --steady-norm-sq 1.1875 --steps 20",
            "predict --optimizer adamw --lr 0.001 --weight-decay 0.1 --steps 20",
            "predict --optimizer lion --lr 0.0001 --weight-decay 1",
            "predict --optimizer muon --lr 0.02 --weight-decay 0.1",
            "simulate --help",
            "report --help",
            "data --help",
        )
    ),
]


def test_what_needs_no_tensor_imports_no_torch():
    """torch takes two seconds. One process runs everything in turn and prints what loaded torch."""
    lines = ["import contextlib, io, sys", "from steadynorm.cli import main"]
    for code in WITHOUT_TORCH:
        lines += [code, f"if sys.modules.pop('torch', None): print({code!r})"]
    assert python("\n".join(lines)) == ""


def test_public_names_are_listed_and_importable():
    assert set(steadynorm.__all__) <= set(dir(steadynorm))
    for name in steadynorm.__all__:
        assert getattr(steadynorm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Scionc'"):
        steadynorm.Scionc  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_every_row_of_numbers_has_its_functions_of_tensors():
    assert list(UPDATES) == list(LMOS)


def test_versions_agree():
    """Only the package's own version is typed by hand; a development version stands for its release in the changelog."""
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert cited is not None and newest is not None
    assert (cited[1], newest[1]) == (steadynorm.__version__, steadynorm.__version__.split(".dev")[0])


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Return a folder with the sdist, and the wheel made from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_data_only(built):
    [wheel] = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "steadynorm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"steadynorm/py.typed", "steadynorm/report/page/page.css"} <= expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert wheel.stat().st_size < 4_000_000  # most of it the State of the Union addresses


@pytest.mark.slow
def test_a_clean_environment_needs_only_torch_and_numpy(built, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # what it names would not be the wheel's
    venv.create(tmp_path, with_pip=True)
    program = tmp_path / "bin" / "python"
    pip = [program, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    [torch] = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    [wheel] = built.glob("*.whl")
    subprocess.run([*pip, torch], check=True, capture_output=True)
    subprocess.run([*pip, wheel], check=True, capture_output=True)
    assert python(FIRST_STEPS, program) == f"{steadynorm.__version__} 1 1.1875"
    for module in ("plotly", "tyro", "rich", "tensorboard", "PIL", "scipy"):
        assert python(f"import importlib.util as u; print(u.find_spec('{module}'))", program) == "None"
    done = subprocess.run([tmp_path / "bin" / "steadynorm", "demo"], capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode != 0 and "pip install -e '.[report,train]'" in done.stderr


WITHOUT = """
import sys
sys.modules[{module!r}] = None
from steadynorm.cli import main
sys.exit(main({words!r}))
"""


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("safetensors", "train gpt --steps 1 --out {out}", "train"),
        ("tyro", "demo", "report,train"),
        ("tokenizers", "data tokenize {source} --out {out} --tokenizer bpe", "train"),
    ],
)
def test_the_error_for_a_missing_package_gives_the_command_that_installs_it(tmp_path, module, words, extra):
    """`steadynorm train` used to say: No module named 'safetensors'."""
    (tmp_path / "a.txt").write_text("To be or not to be", encoding="utf-8")
    words = words.format(out=tmp_path / "out", source=tmp_path / "a.txt").split()
    code = WITHOUT.format(module=module, words=words)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=300)
    remedy = f"install it from your checkout of steadynorm: pip install -e '.[{extra}]'"
    assert (done.returncode, done.stderr) == (2, f"steadynorm: error: {module} is not installed; {remedy}\n")


def test_every_package_of_the_extras_has_its_hint():
    """Conversely, an extra that is named brings the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = project["optional-dependencies"]
    declared = {
        extra: {line.partition(">=")[0] for line in requirements[extra]} for extra in ("report", "train", "jax")
    }
    names = {"PIL": "pillow"}
    assert {names.get(package, package) for package in extras._EXTRAS} == {
        *declared["report"],
        *declared["train"],
        *declared["jax"],
    }
    for package, extra in extras._EXTRAS.items():
        assert all(names.get(package, package) in declared[each] for each in extra.split(","))


def test_a_locale_without_utf8_replaces_what_it_cannot_show():
    """The titles of the experiments contain C²."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    command = [sys.executable, "-m", "steadynorm.cli", "paper", "list"]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"C?" in done.stdout and done.stdout.isascii()


@pytest.mark.parametrize(
    "arguments", [pytest.param(["train", "gpt", "--help"], marks=pytest.mark.slow), ["paper", "list"]], ids=" ".join
)
def test_closing_the_pipe_early_gives_no_traceback(arguments):
    """`steadynorm ... | head -1`; rich would exit with 1, which says that the command failed."""
    with subprocess.Popen(
        [sys.executable, "-m", "steadynorm.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        errors = run.stderr.read().decode()
    assert run.returncode == 141
    assert errors == ""


def test_a_command_runs_with_its_output_closed():
    """`steadynorm ... >&- 2>&-`: Python has no sys.stdout then."""
    script = "import os, sys; os.close(1); os.close(2); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", script, "-m", "steadynorm.cli", "predict", "--lr", "0.01", "--weight-decay", "0.1"]
    assert subprocess.run(command, timeout=300, check=False).returncode == 0


INTERRUPTED = """
import sys
from importlib.abc import MetaPathFinder
class CtrlC(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
from steadynorm.cli import main
sys.exit(main(["train", "gpt", "--steps", "1"]))
"""


@pytest.mark.parametrize("module", ["tyro", "torch.nn"])
def test_ctrl_c_while_importing_ends_without_a_traceback(module):
    code = INTERRUPTED.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "steadynorm: interrupted\n")


@pytest.mark.parametrize("recipe", ["gpt", "vit"])
def test_the_help_of_train_shows_no_doctest(recipe, capsys):
    with pytest.raises(SystemExit):
        main(["train", recipe, "--help"])
    shown = capsys.readouterr().out
    assert "--optim.lr" in shown and ">>>" not in shown and "Traceback" not in shown


def test_without_arguments_the_command_prints_its_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 0 and "usage: steadynorm" in capsys.readouterr().out


def test_the_descriptions_in_the_list_of_commands_are_the_commands_own():
    for name in ("demo", "predict", "simulate", "report", "bench"):
        assert commands._load(name, ()).__doc__ == commands.ABOUT[name]


def test_a_run_stopped_before_its_first_evaluation_ends_without_a_semicolon(monkeypatch, capsys):
    from steadynorm.lab.train import loop
    from steadynorm.lab.train.recipes import RECIPES

    monkeypatch.setattr(loop, "train", lambda config: loop.Result(37, {}, stopped_by=signal.SIGTERM))
    code = training.run_training(RECIPES["gpt"])
    assert (code, capsys.readouterr().out) == (143, "runs/gpt: stopped at step 37\n")
