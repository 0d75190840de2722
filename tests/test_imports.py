"""Imports point one way: every import of the package keeps the table in CONTRIBUTING.md."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from steadynorm import _HOMES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "steadynorm"
MOST_LINES = 350

# What is wrong and known to be. An entry that is no longer needed fails: remove it.
KNOWN_IMPORTS: set[str] = {
    "decay.skip -> groups.roles",
}
KNOWN_LONG: set[str] = set()
KNOWN_TWICE: set[str] = set()
KNOWN_SAME_NAME: set[str] = set()

_REMEDY = "mend what is new, and remove from KNOWN_... what has been mended"


@dataclass(frozen=True)
class Room:
    """A row of the table: modules, and what they must not import."""

    modules: tuple[str, ...]
    banned: tuple[str, ...]

    def bans(self, target: str) -> bool:
        outside = "*" in self.banned and target.startswith("steadynorm.") and not _within(target, self.modules)
        return outside or _within(target, self.banned)


def _within(module: str, names: tuple[str, ...]) -> bool:
    """Tell whether a module is one of these, or in one of them; names of ours may leave out `steadynorm.`."""
    return any(f"{module}.".startswith((f"{name}.", f"steadynorm.{name}.")) for name in names if name != "steadynorm")


def read_table(text: str) -> list[Room]:
    [table] = re.findall(r"^\| room of .*\n\|[-|]*\n((?:\|.*\n)+)", text, re.M)
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [Room(*(tuple(re.findall(r"`([^`]+)`", row[k])) for k in (0, 2))) for row in cells]


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return every module of the package, by its dotted name."""
    paths = {
        path: ".".join((package.name, *path.relative_to(package).with_suffix("").parts))
        for path in package.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): path for path, name in paths.items()}


def imports(name: str, path: Path, names: Mapping[str, Path]) -> Iterator[str]:
    """Yield what a module imports: modules of ours by their full names, other packages by their first."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return (_known(target, names) for target in _imported(package, path.read_text(encoding="utf-8")))


@cache
def _imported(package: str, text: str) -> tuple[str, ...]:
    """Return the dotted names that a module of this package imports. Cached: most tests read the whole package."""
    found = []
    for node in _nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                home = f"steadynorm.{_HOMES[alias.name]}" if base == "steadynorm" and alias.name in _HOMES else base
                found.append(f"{home}.{alias.name}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    return tuple(found)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree, but not into what only type checkers import."""
    yield node
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from _nodes(child)


def _known(target: str, names: Mapping[str, Path]) -> str:
    """Shorten a dotted name to a module of ours, or to another package."""
    while target not in names and "." in target:
        target = target.rpartition(".")[0]
    return target


def edges(package: Path = PACKAGE) -> set[tuple[str, str]]:
    names = modules(package)
    return {(name, target) for name, path in names.items() for target in imports(name, path, names)}


def room_of(module: str, rooms: list[Room]) -> Room:
    fitting = [room for room in rooms if _within(module, room.modules)]
    assert len(fitting) == 1 or module == "steadynorm", f"{module} is in {len(fitting)} rows of CONTRIBUTING's table"
    return fitting[0] if fitting else next(room for room in rooms if room.modules == ("steadynorm",))


def wrong_imports(found: set[tuple[str, str]], rooms: list[Room], known: set[str]) -> list[str]:
    """Return the imports that the table forbids, and those that close a cycle of rooms."""
    broken = {_said(a, b) for a, b in found if room_of(a, rooms).bans(b)}
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for a, b in sorted(found):
        if b.startswith("steadynorm") and _said(a, b) not in known:
            here, there = room_of(a, rooms).modules, room_of(b, rooms).modules
            graph.setdefault(here, set()).update({there} - {here})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [*sorted(broken - known), "cycle: " + " -> ".join("/".join(room) for room in reversed(error.args[1]))]
    return sorted(broken - known)


def _said(a: str, b: str) -> str:
    return f"{a.removeprefix('steadynorm.')} -> {b.removeprefix('steadynorm.')}"


ROOMS = read_table((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def test_imports_keep_the_table_in_contributing():
    assert wrong_imports(edges(), ROOMS, KNOWN_IMPORTS) == []


@pytest.mark.parametrize("known", sorted(KNOWN_IMPORTS))
def test_known_wrong_imports_are_still_there(known: str):
    assert wrong_imports(edges(), ROOMS, KNOWN_IMPORTS - {known}), f"remove {known!r} from KNOWN_IMPORTS"


def test_every_row_names_modules_that_exist():
    for room in ROOMS:
        for name in room.modules:
            assert name == "steadynorm" or f"steadynorm.{name}" in modules(), f"{name} in CONTRIBUTING's table"


PLANTED = {
    "at the top": ("theory/planted.py", "import torch.nn", "theory.planted -> torch"),
    "within a function": ("groups/planted.py", "def f():\n    from steadynorm.optim import scion", "groups.planted -> optim.scion"),
    "by a public name": ("groups/planted.py", "from steadynorm import ScionC", "groups.planted -> optim"),
    "relative": ("groups/planted.py", "from ..optim.scion import Scion", "groups.planted -> optim.scion"),
    "by a string": ("report/planted.py", "importlib.import_module('torch')", "report.planted -> torch"),
    "beside a type checker's": ("theory/planted.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "theory.planted -> torch"),
    "a small module": ("files.py", "import steadynorm.records", "files -> records"),
    "a cycle": ("theory/planted.py", "from steadynorm import lmo", "cycle: .*theory -> lmo.*"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_violation_is_found(case: str, tmp_path: Path):
    file, text, found = PLANTED[case]
    package = tmp_path / "steadynorm"
    for path in modules().values():
        copy = package / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (package / file).write_text(text, encoding="utf-8")
    wrong = wrong_imports(edges(package), ROOMS, KNOWN_IMPORTS)
    assert any(re.fullmatch(found, text) for text in wrong)


def test_imports_for_type_checkers_are_free(tmp_path: Path):
    path = tmp_path / "planted.py"
    path.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", encoding="utf-8")
    assert list(imports("steadynorm.theory.planted", path, {})) == ["typing"]


def test_no_file_is_long():
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name.removeprefix("steadynorm.") for name, lines in lengths.items() if lines > MOST_LINES} == KNOWN_LONG, (
        _REMEDY
    )


def test_no_two_modules_share_a_name():
    stems = Counter(path.stem for path in modules().values() if path.stem not in ("__init__", "__main__"))
    assert {stem for stem, times in stems.items() if times > 1} == KNOWN_TWICE, _REMEDY


def test_no_module_has_the_name_of_a_function_that_it_or_its_package_exports():
    """What `package.name` is would depend on what was imported first."""
    names, shared = modules(), set()
    for name, path in names.items():
        body = ast.parse(path.read_text(encoding="utf-8")).body
        exported = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if path.name == "__init__.py":
            here = [node for node in body if isinstance(node, ast.ImportFrom)]
            exported |= {
                alias.name for node in here for alias in node.names if f"{node.module}.{alias.name}" not in names
            }
            exported |= set(_HOMES) if name == "steadynorm" else set()
            shared |= {f"{name}.{each}" for each in exported} & set(names)
        elif path.stem in exported:
            shared.add(name)
    assert {name.removeprefix("steadynorm.") for name in shared} == KNOWN_SAME_NAME, _REMEDY
