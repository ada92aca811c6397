"""Parts of a source file, verbatim but for their common indentation. What is not there is a ValueError."""

from __future__ import annotations

import ast
import textwrap


def definition(source: str, dotted: str) -> str:
    """A function, class, method ("Class.method") or assigned name, decorators included."""
    body: list[ast.stmt] = ast.parse(source).body
    node: ast.stmt | None = None
    for name in dotted.split("."):
        node = next((n for n in body if name in _names(n)), None)
        if node is None:
            raise ValueError(f"no {name!r} to quote" + (f" in {dotted!r}" if name != dotted else ""))
        body = getattr(node, "body", [])
    assert node is not None and node.end_lineno is not None
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return _lines(source, first, node.end_lineno)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def between(source: str, start: str, stop: str) -> str:
    """From the one line that contains `start`, to the first one from there on that contains `stop`."""
    lines = source.split("\n")
    firsts = [i for i, line in enumerate(lines, 1) if start in line]
    if len(firsts) != 1:
        raise ValueError(f"from={start!r} is on {len(firsts)} lines, it must be on one")
    last = next((i for i in range(firsts[0], len(lines) + 1) if stop in lines[i - 1]), None)
    if last is None:
        raise ValueError(f"to={stop!r} is on no line from {firsts[0]} on")
    return _lines(source, firsts[0], last)


def _lines(source: str, first: int, last: int) -> str:
    return textwrap.dedent("\n".join(source.split("\n")[first - 1:last]))
