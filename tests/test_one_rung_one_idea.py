"""Promise 2: to understand rung N, no file of a later rung is ever opened."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from liteinfer import lineage

PACKAGE = Path(lineage.__file__).parent
FILES = sorted(str(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py"))
LONGEST_FILE, LONGEST_RUNG = 150, 300   # lines of code, about
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def imported_files(source: str) -> set[str]:
    """Files of the package that this source imports anywhere, functions included, or names as "module:Object"."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            modules |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("liteinfer."):
            modules.add(node.value.split(":")[0])
    paths = {module.removeprefix("liteinfer.").replace(".", "/") + ".py"
             for module in modules if module.startswith("liteinfer.")}
    return {path for path in paths if (PACKAGE / path).exists()}


def code_lines(path: str) -> int:
    """Lines that hold code: no blanks, comments or docstrings."""
    tree = ast.parse((PACKAGE / path).read_text())
    lines: set[int] = set()
    docstrings = {id(node.body[0].value) for node in ast.walk(tree)
                  if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
                  and node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.stmt)) and id(node) not in docstrings and not (
                isinstance(node, ast.Expr) and id(node.value) in docstrings):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.If, ast.For, ast.AsyncFor, ast.While, ast.With,
                                 ast.Try)):
                lines.add(node.lineno)
            else:
                lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_every_file_has_a_chapter() -> None:
    assert sorted(lineage.FILES) == FILES


@pytest.mark.parametrize("path", [path for path in FILES if path not in lineage.EXEMPT])
def test_no_file_imports_one_of_a_later_chapter(path: str) -> None:
    own = lineage.FILES[path]
    if path in ("__init__.py", "__main__.py"):
        return   # the package's front door leads to LLM and the command line, which are exempt
    later = {other for other in imported_files((PACKAGE / path).read_text()) if lineage.FILES[other] > own}
    assert not later, f"{path} (chapter {own}) imports {later}"


def test_the_import_check_sees_imports_in_functions_and_strings() -> None:
    source = "def f():\n    from liteinfer.model import rope\n    import liteinfer.cache.contiguous\n"
    assert imported_files(source) == {"model/rope.py", "cache/contiguous.py", "model/__init__.py"} - {
        "model/__init__.py"}
    assert imported_files('x = "liteinfer.engines.no_cache:NoCacheEngine"') == {"engines/no_cache.py"}


# Chapter 8 has two halves, each as long as a rung. Around the second lies a tool: data, files and a command.
SECOND_HALF = {f"speculative/{name}.py" for name in ("listening", "draft_head", "fallback", "train/ahead")}
TOOL = {f"speculative/{name}.py" for name in ("choose", "head_files", "train/prompts", "train/corpus", "train/fit",
                                              "train/run", "train/plan", "train/__main__")}
# Chapter 10 is the engine on a thread of its own and what clients ask of logits. Around it lies HTTP: names and shapes.
TOOL |= {f"server/{name}.py" for name in ("generation", "answers", "app", "service", "protocol", "responses", "errors",
                                          "limits", "metrics", "snapshot", "live", "serve")}
CHAPTERS = sorted({chapter for chapter in lineage.FILES.values() if chapter})


@pytest.mark.parametrize(("chapter", "second"), [*((chapter, False) for chapter in CHAPTERS), (8, True)])
def test_a_rung_is_short_enough_to_read(chapter: int, second: bool) -> None:
    sizes = {path: code_lines(path) for path, introduced in lineage.FILES.items()
             if introduced == chapter and not path.startswith("kernels/")}   # a kernel is as long as it has to be
    assert max(sizes.values()) <= LONGEST_FILE, sizes
    half = {path: size for path, size in sizes.items() if path not in TOOL and (path in SECOND_HALF) == second}
    assert sum(half.values()) <= LONGEST_RUNG, half


def test_the_ladder_is_consistent() -> None:
    names = [row.name for row in lineage.LADDER]
    assert len(set(names)) == len(names)
    for i, row in enumerate(lineage.LADDER):
        assert row.improves_on is None or row.improves_on in names[:i]
        assert lineage.find(row.name) is row is lineage.find(row.name.removeprefix("liteinfer-"))
        module = row.engine.split(":")[0].removeprefix("liteinfer.").replace(".", "/") + ".py"
        assert lineage.FILES[module] <= row.chapter
    assert lineage.DEFAULT in names
    with pytest.raises(ValueError, match=r"unknown row 'fastest'; the rows are liteinfer-nocache, .*native-packed"):
        lineage.find("fastest")
