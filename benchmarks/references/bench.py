"""A run in which some rows are references: they take their turns like the others, in a process of their own.

A process lives for one turn, so that none holds memory, or spins, while another row is measured. One that dies or
hangs costs its row what is left of it, with the reason; nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import ceilings, metrics
from benchmarks.machine import usable_cpus
from benchmarks.references.process import Process
from benchmarks.result_file import Result
from benchmarks.run import PASSES, Bench, Record, _headline, raw
from benchmarks.workloads import Shape
from liteinfer import lineage
from liteinfer.lineage import Row
from liteinfer.loading import LoadedModel


@dataclass
class WithReferences(Bench):
    """A `Bench` that can run references. `start` is replaced in tests; `logs` is where their output goes."""

    logs: Path = Path("benchmarks/results/local")
    start: Callable[..., Any] = Process
    versions: dict[str, dict[str, str]] = field(default_factory=dict)   # by row: of the packages that ran it

    def _turn(self, record: Record, round_: int) -> None:
        row, width = record.entry.row, record.entry.width
        if row.environment is None:
            super()._turn(record, round_)
            return
        with started(row, width, self.model, self.shape, self.logs, self.start) as process:
            self.versions[row.name] = process.versions
            process.drive(record.load.requests("warmup"), width)
            taken: Result = {"raw": {}, "linear_ms": None}
            for what in PASSES:
                self._pass(process, record, what, taken)
                self.watch.passed(row.name, width, round_, what, taken[what][_headline(what)])
        record.rounds.append(taken)

    def _pass(self, process: Any, record: Record, what: str, taken: Result) -> None:
        requests = record.load.requests(what)
        wanted = {request.request_id: request.params.max_tokens for request in requests}
        arrivals = self.shape.arrivals(len(requests)) if what == "throughput" else None
        traces = process.drive(requests, 1 if what == "latency" else None, arrivals)
        taken[what] = metrics.latency(traces, wanted) if what == "latency" else metrics.throughput(traces, wanted)
        if arrivals:
            taken[what] |= metrics.arrivals(traces, wanted, None)
        taken["raw"][what] = [raw(trace, traces[0].added_at) for trace in traces]
        record.counters[what] = {}   # what it counts is not what we count
        record.failed += [line for line in metrics.failures(traces, wanted) if line not in record.failed]
        for trace in traces:
            record.outputs.setdefault(trace.request_id, trace.token_ids)

    def _step(self, record: Record) -> ceilings.Step | None:
        """A reference counts nothing of ours: with a cache, a decode step feeds one token."""
        if record.entry.row.environment is None:
            return super()._step(record)
        lengths = [self.shape.output_length(i) for i in range(len(record.load.latency))]
        return ceilings.Step(1, self.shape.isl + mean(lengths) / 2, cached=True) if max(lengths) > 1 else None

    def _row(self, record: Record, first: Record) -> Result:
        out, name = super()._row(record, first), record.entry.row.name
        return out | ({"versions": self.versions[name]} if name in self.versions else {})


@contextmanager
def started(row: Row, width: int, model: LoadedModel, shape: Shape, logs: Path,
            start: Callable[..., Any] = Process) -> Iterator[Any]:
    """The process of a reference, ready to be driven; closed at the end, whatever happens."""
    process = start(lineage.python_of(row), row.engine, adapter_settings(row, width, model, shape), variables(row),
                    logs / f"{row.name}.log")
    try:
        yield process
    finally:
        process.close()


def adapter_settings(row: Row, width: int, model: LoadedModel, shape: Shape) -> dict[str, Any]:
    """The adapter's settings (`contract.Settings`) for a run at this width.

    Raises:
        ValueError: the model does not lie in a folder that another library could read.
    """
    folder = getattr(model.tokenizer, "name_or_path", None)
    if not folder or not Path(folder).is_dir():
        raise ValueError(f"{row.name} needs the folder of a model in Hugging Face form; {model.name!r} has none")
    device = model.device.type
    longest = shape.isl + max(*shape.output, shape.warmup_tokens)
    return {"model": folder, "dtype": str(model.dtype).removeprefix("torch."), "device": device,
            "max_num_seqs": width, "max_model_len": longest, "enforce_eager": device == "cpu"}


def variables(row: Row) -> dict[str, str]:
    """Environment variables of a reference's process. vLLM on a CPU is told to use all cores: alone it leaves one."""
    if row.environment != "vllm":
        return {"HF_HUB_OFFLINE": "1"}
    cpus = usable_cpus()
    return {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)), "OMP_NUM_THREADS": str(len(cpus))}
