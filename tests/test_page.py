"""The benchmark page without a browser: both forms say what the stored results say."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.result_file import load
from benchmarks.table import BLOCKS, Bar, bar
from benchmarks.topics import MAIN, NO_GPU, TOPICS
from tests.results import no_hash

ROOT = Path(__file__).parent.parent


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of what the page is made from."""
    for name in ("benchmarks/results", "chapters"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("local", "*.svg", "*.md"))
    shutil.copy(ROOT / page.TEMPLATE, tmp_path / page.TEMPLATE)
    return tmp_path


def test_both_forms_are_written_once_and_named_when_stale(root: Path) -> None:
    both = [page.HTML, page.MARKDOWN]
    assert page.render_page(root, check=True, current=no_hash) == both and not (root / page.HTML).exists()
    assert page.render_page(root, check=False, current=no_hash) == both
    assert page.render_page(root, check=True, current=no_hash) == []
    (root / page.MARKDOWN).write_text("typed by hand")
    assert page.render_page(root, check=True, current=no_hash) == [page.MARKDOWN]


def test_a_stored_result_of_older_code_is_named(root: Path) -> None:
    page.render_page(root, check=False, current=lambda name: "other")
    lines = page.render_page(root, check=True, current=lambda name: "other")
    assert f"benchmarks/results/{MAIN}.json row liteinfer-eager is stale: its code has changed" in lines


def test_bars_are_as_long_as_the_numbers_say(root: Path) -> None:
    page.render_page(root, check=False, current=no_hash)
    text = (root / page.HTML).read_text()
    rows = load(root / "benchmarks" / "results" / f"{MAIN}.json")["rows"]
    rates = [row["throughput"]["tok_s"] for row in rows]
    drawn = {float(width) for width in re.findall(r"width: ?([0-9.]+)%", text)}
    for rate in rates:
        assert any(abs(width - 100 * rate / max(rates)) < 0.01 for width in drawn), rate


def test_a_bar_remembers_its_exact_share() -> None:
    drawn = bar(1 / 3)
    assert isinstance(drawn, Bar) and drawn.share == 1 / 3 and set(drawn) <= set(BLOCKS)


def test_the_page_needs_nothing_from_elsewhere(root: Path) -> None:
    page.render_page(root, check=False, current=no_hash)
    text = (root / page.HTML).read_text()
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|src=", text)
    assert len(text.encode()) < 300_000


def test_what_is_not_stored_is_an_error_that_names_it(root: Path) -> None:
    (root / "benchmarks" / "results" / "radix.json").unlink()
    with pytest.raises(ValueError, match=r"no benchmarks/results/radix\.json"):
        page.render_page(root, check=True, current=no_hash)


def test_another_machine_stands_beside_with_facts_of_its_own(root: Path) -> None:
    results = root / "benchmarks" / "results"
    (results / "h200").mkdir()
    text = (results / f"{MAIN}.json").read_text()
    name = load(results / f"{MAIN}.json")["machine"]["name"]
    (results / "h200" / f"{MAIN}.json").write_text(text.replace(name, "Toy GPU <b>"))
    page.render_page(root, check=False, current=no_hash)
    markdown, html = (root / page.MARKDOWN).read_text(), (root / page.HTML).read_text()
    assert "## Toy GPU <b>" in markdown and "Toy GPU &lt;b&gt;" in html and "Toy GPU <b>" not in html
    assert f"Not measured on this machine: {TOPICS[1].title}" in markdown
    assert NO_GPU not in markdown


def test_what_to_store_for_a_gpu_is_a_result_that_the_page_shows() -> None:
    told = re.search(r"results/NAME/(\w+)\.json", NO_GPU)
    assert told and told[1] in {topic.result for topic in TOPICS}


def test_a_folder_without_any_result_of_the_page_is_an_error(root: Path) -> None:
    (root / "benchmarks" / "results" / "empty").mkdir()
    with pytest.raises(ValueError, match="benchmarks/results/empty has no result that the page shows"):
        page.render_page(root, check=True, current=no_hash)
