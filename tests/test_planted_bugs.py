"""Every planted bug is caught, by an assertion of the named test.

Each bug is applied to a copy, and the named test runs there in a process of its
own. The processes come from a fork server that has imported torch and
transformers once, which is most of what a test run would otherwise cost.
"""

from __future__ import annotations

import multiprocessing
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.planted_bugs import BUGS, Bug

ROOT = Path(__file__).parents[1]


def run_test(root: str, test: str, answer) -> None:
    """In the child: run one test of the tree at `root`; put ("passed", "") or ("failed", kind of exception)."""
    import os
    import sys

    os.chdir(root)
    sys.path.insert(0, root)
    outcome: list[tuple[str, str]] = []

    class Watcher:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item, call):
            report = yield
            if call.excinfo is not None:
                outcome.append((f"failed in {call.when}", call.excinfo.typename))
            elif call.when == "call":
                outcome.append(("passed", ""))
            return report

    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        pytest.main([test, "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"], plugins=[Watcher()])
    import liteinfer

    where = str(Path(liteinfer.__file__).resolve())
    answer.put((outcome, where))


@pytest.fixture(scope="module")
def processes() -> multiprocessing.context.ForkServerContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("needs a fork server (not on Windows)")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "transformers.models.llama.modeling_llama",
                                    "transformers.models.qwen2.modeling_qwen2", "scipy.stats", "hypothesis", "pytest",
                                    "nbval.plugin"])   # a plugin of pytest: five seconds of each start
    return context


def outcome_of(bug: Bug, processes: multiprocessing.context.ForkServerContext, tree: Path) -> list[tuple[str, str]]:
    answer = processes.SimpleQueue()
    child = processes.Process(target=run_test, args=(str(tree), bug.test, answer))
    child.start()
    child.join(300)
    assert child.exitcode == 0, f"the test run of {bug} did not end well: exit code {child.exitcode}"
    outcome, where = answer.get()
    assert Path(where).is_relative_to(tree.resolve()), f"the copy was not the one tested: {where}"
    return outcome


def copy_of_the_tree(tree: Path) -> None:
    for folder in ("liteinfer", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "results", "heads"))
    shutil.copy(ROOT / "pyproject.toml", tree)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.file}:{bug.new[:30]}")
def test_planted_bug_is_caught(bug: Bug, processes: multiprocessing.context.ForkServerContext, tmp_path: Path) -> None:
    """The named test, in a copy of the tree that has the bug."""
    if bug.file.startswith(("fast/", "kernels/cpu.")):
        from liteinfer.kernels.build import compiler  # not above: the child would have this tree's package then

        if compiler() is None:
            pytest.skip("needs a C++ compiler")
    found = (ROOT / "liteinfer" / bug.file).read_text().count(bug.old)
    assert found == 1, f"the table is out of date: {bug.old!r} stands {found} times"
    copy_of_the_tree(tmp_path)
    path = tmp_path / "liteinfer" / bug.file
    path.write_text(path.read_text().replace(bug.old, bug.new))
    outcome = outcome_of(bug, processes, tmp_path)
    assert ("failed in call", "AssertionError") in outcome, f"not caught by {bug.test}: {outcome}"
    assert {kind for how, kind in outcome if how != "passed"} == {"AssertionError"}, outcome


@pytest.mark.slow   # the same tests run unchanged in every run; here in the child processes
def test_the_named_tests_pass_on_an_unchanged_copy(processes: multiprocessing.context.ForkServerContext,
                                                   tmp_path: Path) -> None:
    copy_of_the_tree(tmp_path)
    tests = sorted({bug.test for bug in BUGS})
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda test: outcome_of(Bug("", "", "", test), processes, tmp_path), tests))
    assert dict(zip(tests, results, strict=True)) == {test: [("passed", "")] for test in tests}


def test_the_table_covers_each_file_of_the_ladder() -> None:
    from liteinfer import lineage

    assert len(BUGS) >= 8
    untouched = {path for path, chapter in lineage.FILES.items() if chapter} - {bug.file for bug in BUGS}
    assert untouched == {"engines/native_cache.py"}, untouched   # forty lines of glue, held by the others' tests
