"""Result files: what is in one, reading it, and writing it whole or not at all.

A file without a `kind` holds rows of the ladder (`run`); the kinds are called
like the commands that make them, but for `kv_memory` (`memory`).
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ceilings import Sizes

if TYPE_CHECKING:
    from liteinfer.loading import LoadedModel

Result = dict[str, Any]

SCHEMA = 1
ROWS: dict[str | None, set[str]] = {   # by kind, what every row of a result has
    None: {"name", "latency", "throughput", "prompts"},
    "widths": {"name", "linear_path", "widths", "code_hash"},
    "radix": {"name", "prefix", "cold_ms", "cached_ms", "speedup", "code_hash"},
    "sharing": {"name", "workload", "hit_rate", "ttft_p50_ms", "wall_s", "code_hash"},
    "overhead": {"name", "step_us", "kv_us", "code_hash"},
    "speculative": {"name", "prompts_kind", "draft", "k", "width", "tok_s", "speedup", "code_hash"},
    "heads": {"name", "parameters", "acceptance", "guess_ms", "cost"},
    "pieces": {"name", "without", "width", "itl_p50_ms", "prefill_ms", "code_hash"},
    "profile": {"name", "width", "step_ms", "profiled_ms", "parts_ms", "ceilings_ms", "code_hash"},
    "shapes": {"name", "isl", "osl", "ttft_ms", "tpot_ms", "e2e_ms", "code_hash"},
}
REQUIRED: dict[str | None, tuple[str, ...]] = {
    None: ("machine", "versions", "model", "workload", "rows"),
    "kv_memory": ("machine", "versions", "model", "isl", "block_size", "max_model_len", "budget_bytes", "lengths",
                  "waste", "code_hash"),
    "widths": ("machine", "versions", "model", "isl", "osl", "rounds", "rows", "turning_point", "code_hash"),
    "radix": ("machine", "versions", "model", "question", "rounds", "pool", "rows", "code_hash"),
    "sharing": ("machine", "versions", "model", "rounds", "pool", "workloads", "rows", "code_hash"),
    "overhead": ("machine", "versions", "model", "sequences", "isl", "osl", "rounds", "real_step_ms", "tree_us",
                 "tree_share", "rows", "code_hash"),
    "speculative": ("machine", "versions", "model", "rounds", "max_tokens", "prompt_hash", "rows", "loops", "costs",
                    "code_hash"),
    "heads": ("machine", "versions", "model", "rounds", "k", "isl", "osl", "rows", "code_hash"),
    "pieces": ("machine", "versions", "model", "rounds", "isl", "osl", "rows", "code_hash"),
    "profile": ("machine", "versions", "model", "rounds", "isl", "osl", "rows", "code_hash"),
    "shapes": ("machine", "versions", "model", "rounds", "prompts", "rows", "code_hash"),
}


def dig(tree: Any, path: str) -> Any:
    """Follow a dotted path through nested dicts and lists; None where it leads nowhere.

    >>> dig({"lengths": [{"saved": 0.5}]}, "lengths.0.saved")
    0.5
    """
    for key in path.split("."):
        if isinstance(tree, list) and key.isdecimal() and int(key) < len(tree):
            tree = tree[int(key)]
        else:
            tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def load(path: str | Path) -> Result:
    """Read one result file.

    Raises:
        ValueError: no such file, not JSON, or another schema; the message names the file.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; `python -m benchmarks run --out {path}` makes it") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:   # not JSON, or not UTF-8
        raise ValueError(f"{path}: not a JSON file: {error}") from None
    schema = result.get("schema") if isinstance(result, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path}: result schema is {schema!r}, this version reads {SCHEMA}")
    kind = result.get("kind")
    if kind not in REQUIRED:
        raise ValueError(f"{path}: result kind is {kind!r}, this version reads {', '.join(filter(None, REQUIRED))}")
    if missing := [key for key in REQUIRED[kind] if key not in result]:
        raise ValueError(f"{path}: not a whole result, {', '.join(missing)} missing")
    rows, whole = result.get("rows", []), ROWS.get(kind, set())
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= whole for row in rows):
        raise ValueError(f"{path}: not a whole result, rows is not a list of rows with {', '.join(sorted(whole))}")
    return {**result, "source": Path(path).stem}


def save(result: Result, path: Path) -> None:
    """Write the result whole or not at all, whenever the process is stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def without_raw(tree: Any) -> Any:
    """A copy without the timestamps, which stand under keys named "raw": what is committed."""
    if isinstance(tree, dict):
        return {key: without_raw(value) for key, value in tree.items() if key != "raw"}
    return [without_raw(value) for value in tree] if isinstance(tree, list) else tree


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package, distribution in (("torch", "torch"), ("transformers", "transformers"),
                                  ("liteinfer", "liteinfer-course")):
        try:
            found[package] = version(distribution)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def head(model: LoadedModel, machine: Mapping[str, Any], kind: str | None = None) -> Result:
    """What every result begins with: when, where, with which versions, of which model."""
    sizes = Sizes.of(model.config, model.dtype)
    return {"schema": SCHEMA, **({"kind": kind} if kind else {}), "date": date.today().isoformat(),
            "machine": dict(machine), "versions": versions(),
            "model": {"name": model.name, "parameters": sizes.parameters, "weight_bytes": sizes.weight_bytes,
                      "dtype": str(model.dtype).removeprefix("torch."),
                      "kv_bytes_per_token": sizes.kv_per_token * sizes.itemsize}}
