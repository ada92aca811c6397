"""One hash per row (and per kind of result) over the code that made it, so that a stale result shows.

A row's code is its engine's module and its parts', with all they import from
liteinfer (imports inside functions included), the four files that drive and
count a run, and the text the prompts come from. Files are hashed as syntax
trees without docstrings: editing a comment makes no result stale, editing a
statement does. A C++ file counts as it stands, with the module of its name.
The ladder itself is left out, but for the row's own entry, and so are the
packages' __init__ files, which hold no code that runs in a step.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from liteinfer.lineage import Row

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ("benchmarks.loop", "benchmarks.workloads", "benchmarks.metrics", "benchmarks.run")
REFERENCE = ("benchmarks.references.bench", "benchmarks.references.worker", "benchmarks.references.contract")
KINDS = {
    "kv_memory": ("benchmarks.memory",),
    "widths": ("benchmarks.widths", "benchmarks.ceilings", "benchmarks.measurement"),
    "radix": ("benchmarks.radix", "benchmarks.measurement"),
    "sharing": ("benchmarks.sharing", "benchmarks.scenarios", "benchmarks.radix", "benchmarks.stopwatch",
                "benchmarks.measurement"),
    "overhead": ("benchmarks.overhead", "benchmarks.radix", "benchmarks.stopwatch", "benchmarks.measurement"),
    "speculative": ("benchmarks.speculative", "benchmarks.speculative_cases", "benchmarks.drafts",
                    "benchmarks.chats", "benchmarks.repetition", "benchmarks.radix", "benchmarks.measurement"),
    "heads": ("benchmarks.heads", "benchmarks.stopwatch", "benchmarks.measurement"),
    "pieces": ("benchmarks.pieces", "benchmarks.widths", "benchmarks.measurement"),
    "profile": ("benchmarks.profile", "benchmarks.ceilings", "benchmarks.measurement"),
    "shapes": ("benchmarks.shapes", "benchmarks.measurement"),
}
DATA = {"speculative": "benchmarks/data/speculative.json"}   # what a kind of result is measured on besides TEXT
DRAFTERS, HEADS = "liteinfer.speculative.choose", "liteinfer/speculative/heads"   # a row of the first has the second
EXCLUDED = ("liteinfer.lineage",)
TEXT = "benchmarks/data/prose.txt"


def row_hash(row: Row, root: Path | None = None) -> str:
    """The hash of one row's code, 16 hex digits. `root` is the repository (this one)."""
    root = root or ROOT
    entry = (row.name, row.engine, sorted(row.parts.items()), row.widths)
    modules = [target.partition(":")[0] for target in (row.engine, *row.parts.values())]
    modules += REFERENCE if row.environment else ()   # what drives those that run in a process of their own
    heads = sorted((root / HEADS).rglob("*.*")) if any(DRAFTERS in target for target in row.parts.values()) else []
    weights = [hashlib.sha256(path.read_bytes()).hexdigest() for path in heads]
    return _hash([repr(entry), *_files((*modules, *RUNNER), root), *weights,
                  (root / TEXT).read_text(encoding="utf-8")])


def kind_hash(kind: str, root: Path | None = None) -> str:
    """The hash of the code that makes a kind of result, and of its prompts; the rows have hashes of their own."""
    root = root or ROOT
    data = [(root / DATA[kind]).read_text(encoding="utf-8")] if kind in DATA else []
    return _hash([*_files(KINDS[kind], root), *data])


def _files(modules: Iterable[str], root: Path) -> Iterator[str]:
    for file in closure(modules, root):
        yield f"\n{file.relative_to(root).as_posix()}\n"
        yield code_of(file.read_text(encoding="utf-8"))
        if (compiled := file.with_suffix(".cpp")).is_file():   # what a module compiles bears its name
            yield compiled.read_text(encoding="utf-8")


def _hash(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def total_hash(hashes: Iterable[str]) -> str:
    """One hash over several rows', whatever their order."""
    return hashlib.sha256(" ".join(sorted(hashes)).encode()).hexdigest()[:16]


def closure(modules: Iterable[str], root: Path | None = None) -> list[Path]:
    """The files of these modules and of all they import that counts, over and over; sorted."""
    root, waiting, found = root or ROOT, list(modules), set[Path]()
    counted = {*RUNNER, *waiting}
    while waiting:
        module = waiting.pop()
        if module in counted or (module.startswith("liteinfer.") and module not in EXCLUDED):
            file = root.joinpath(*module.split(".")).with_suffix(".py")
            if file.is_file() and file not in found:
                found.add(file)
                waiting.extend(imports_of(file.read_text(encoding="utf-8")))
    return sorted(found)


@lru_cache(maxsize=256)   # rows share most of their files
def code_of(source: str) -> str:
    """The syntax tree as text, without comments, layout and docstrings.

    >>> code_of('x = 1  # one') == code_of('x  =  1')
    True
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and _docstring(node):
            node.body = node.body[1:]
    return _shape(tree)


def _shape(node: object) -> str:
    """A tree as text. ast.dump's own differs between Python versions; empty fields are what newer ones add."""
    if isinstance(node, ast.AST):
        fields = ", ".join(f"{key}={_shape(value)}" for key, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({fields})"
    return f"[{', '.join(map(_shape, node))}]" if isinstance(node, list) else repr(node)


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node, clean=False) is not None


@lru_cache(maxsize=256)
def imports_of(source: str) -> frozenset[str]:
    """Every module a file may load: `from a import b` names a, and a.b in case b is a module."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(found)
