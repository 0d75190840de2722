"""Replace one expression or statement of a function, found by its syntax tree.

Formatting, comments and the rest of the file play no part, so a mutant keeps applying until the formula it breaks is
rewritten or moves to another function.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "steadynorm"


class Mutant(NamedTuple):
    """One broken formula.

    Attributes:
        place: Module and qualified name, as in `theory.momentum:Filter.gain`: a function, or a variable of a module or
            class.
        breaks: What is wrong with the broken program.
        old: The expression, the statements (`a = 1; b = 2`) or the keyword argument (`name=value`) to replace. It must
            occur exactly once at `place`.
        new: What replaces it. If empty, the statement is deleted.
        tests: Files or test ids under tests/, at least one of which must fail.
    """

    place: str
    breaks: str
    old: str
    new: str
    tests: tuple[str, ...]


def in_module(module: str, *tests: str) -> Callable[..., Mutant]:
    """Return a maker of mutants in one module, caught by the same tests unless an entry names its own."""

    def make(name: str, breaks: str, old: str, new: str, *own_tests: str) -> Mutant:
        return Mutant(f"{module}:{name}", breaks, old, new, own_tests or tests)

    return make


def module_path(mutant: Mutant, source: Path = SOURCE) -> Path:
    """Return the file that a mutant changes; a package is its `__init__.py`."""
    path = source.joinpath(*mutant.place.partition(":")[0].split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def mutate(mutant: Mutant, source: Path = SOURCE) -> str:
    """Return the source of the mutated module.

    Raises:
        ValueError: If the place does not exist, or `old` does not occur there exactly once.
    """
    module, _, name = mutant.place.partition(":")
    where = f"mutant {mutant.breaks!r} of {mutant.place}"
    path = module_path(mutant, source)
    if not path.exists():
        raise ValueError(f"{where}: there is no module {module} in {source}")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    scopes = list(_definitions(tree, name.split(".")))
    if not scopes:
        raise ValueError(f"{where}: {path.name} defines no function or variable {name}")
    readings = list(_readings(mutant.old, mutant.new))
    matches = [(*match, old, new) for old, new in readings for scope in scopes for match in _matches(scope, old)]
    if len(matches) != 1:
        raise ValueError(f"{where}: its code must occur once in {name} but occurs {len(matches)} times: {mutant.old!r}")
    container, slot, old, new = matches[0]
    if isinstance(slot, int):
        container[slot : slot + len(old)] = new or ([] if len(container) > len(old) else [ast.Pass()])
    else:
        container[slot] = new[0]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _definitions(scope: ast.AST, names: Sequence[str]) -> Iterator[ast.AST]:
    """Yield what defines a qualified name; a property and its setter are two."""
    for node in ast.iter_child_nodes(scope):
        is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if names[0] in ([node.name] if is_scope else [getattr(target, "id", None) for target in targets]):
            yield from _definitions(node, names[1:]) if names[1:] else [node]
        elif not is_scope:
            yield from _definitions(node, names)


def _readings(old: str, new: str) -> Iterator[tuple[list[ast.AST], list[ast.AST]]]:
    """Yield what the two texts can be: an expression each, or statements each, or a keyword argument each."""
    try:
        yield [ast.parse(old, mode="eval").body], [ast.parse(new, mode="eval").body]
    except SyntaxError:
        pair = ast.parse(old).body, ast.parse(new).body
        yield list(pair[0]), list(pair[1])
        keywords = [[_keyword(node) for node in body] for body in pair]
        if all(len(nodes) == 1 and nodes[0] is not None for nodes in keywords):
            yield keywords[0], keywords[1]


def _keyword(node: ast.stmt) -> ast.keyword | None:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return ast.keyword(node.targets[0].id, node.value)
    return None


def _matches(scope: ast.AST, pattern: Sequence[ast.AST]) -> Iterator[tuple[list | dict, int | str]]:
    """Yield the list and index, or the attributes and name, at which the pattern's syntax tree occurs."""
    wanted = [ast.dump(node) for node in pattern]

    def occurs(nodes: Sequence[ast.AST]) -> bool:  # types first: dumping every node of a function takes seconds
        return [*map(type, nodes)] == [*map(type, pattern)] and [*map(ast.dump, nodes)] == wanted

    for node in ast.walk(scope):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                slots = range(len(value) - len(wanted) + 1)
                yield from ((value, slot) for slot in slots if occurs(value[slot : slot + len(wanted)]))
            elif isinstance(value, ast.AST) and occurs([value]):
                yield vars(node), field
