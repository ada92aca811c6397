"""A pytest plugin: nbval does not compare stderr, where a library's new warning or a progress bar would land."""

from __future__ import annotations

import pytest


def pytest_collectstart(collector: pytest.Collector) -> None:
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)
