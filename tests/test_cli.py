"""`liteinfer generate --stats`: what the engine holds and did, on stderr; the text alone on stdout."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from liteinfer import cli, llm
from liteinfer.loading import LoadedModel


@pytest.mark.ch04
def test_stats_report_the_pool_and_the_counters(smol: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "load_model", lambda *_, **__: smol)
    command = ["generate", "The sky is", "--max-tokens", "3", "--row", "paged", "--device", "cpu"]
    plain, told = (CliRunner().invoke(cli.app, [*command, *more]) for more in ([], ["--stats"]))
    assert plain.exit_code == told.exit_code == 0
    assert plain.stderr == "" and plain.stdout == told.stdout != ""
    pool, counters = told.stderr.splitlines()
    assert pool.startswith("KV pool: 512 blocks of 16 tokens, 377.5 MB (")     # all of 8,192 tokens, on any machine
    assert counters.startswith("forward_passes 3, tokens_computed 5, ") and "blocks_peak 1" in counters
