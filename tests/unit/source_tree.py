"""The package as its source text says it is: modules, what they import, what they write to."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Module:
    """One file of the package. `name` is dotted; packages go by their own name."""

    name: str
    file: Path
    text: str = dataclasses.field(repr=False)
    tree: ast.Module = dataclasses.field(repr=False)

    @property
    def unit(self) -> str:
        """The folder or file directly below the package that this belongs to; "__init__" for the package's own."""
        return self.name.split(".")[1] if "." in self.name else "__init__"


@functools.cache
def modules() -> dict[str, Module]:
    found = {}
    for file in sorted((ROOT / "polymux").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = file.read_text(encoding="utf-8")
        found[name] = Module(name, file, text, ast.parse(text))
    return found


def imports(module: Module, *, at_run_time: bool = False) -> Iterator[str]:
    """The modules of this package that `module` imports anywhere; not those for type checkers if `at_run_time`."""
    skipped = set(map(id, _only_for_types(module.tree))) if at_run_time else set()
    for node in ast.walk(module.tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.name}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules():
                    yield whole
                elif node.module in modules():
                    yield str(node.module)


def _only_for_types(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from (inner for statement in node.body for inner in ast.walk(statement))


def writes_to_imported(module: Module) -> Iterator[int]:
    """Lines that assign to an attribute or an item of something imported: monkey patches, and what looks like one."""
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            target: ast.expr = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            target = node.args[0]
        else:
            continue
        if _root(target) in imported:
            yield node.lineno


def _root(node: ast.expr) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def functions(module: Module) -> Iterator[tuple[str, int]]:
    """Every function with its length in lines, decorators not counted."""
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield f"{module.name}.{node.name}", node.end_lineno - node.lineno + 1


def words(text: str) -> set[str]:
    """The words of a text in lower case, those inside identifiers too: FluxPipe2 gives flux, pipe, fluxpipe.

    Neighbours in an identifier count joined as well (HiDream: hidream), and digits at the end do not.
    """
    found = set()
    for chunk in set(re.findall(r"[A-Za-z0-9]+", text)):
        parts = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z0-9]+", chunk)
        joined = [a + b for a, b in itertools.pairwise(parts)]
        found |= {word.lower() for word in (chunk, *parts, *joined)}
    return found | {word.rstrip("0123456789") for word in found}
