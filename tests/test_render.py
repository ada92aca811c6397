"""The generated parts of the pages, and that this repository's are current."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import matplotlib
import pytest

from benchmarks.render import render
from liteinfer.plots.__main__ import stale
from tests.results import FIXTURE, no_hash

ROOT = Path(__file__).parent.parent

SOURCE = '''"""A toy."""
import functools

LIMIT = 8   # tokens


class Engine:
    """Counts."""

    @functools.cache
    def step(self, n: int) -> int:
        """One step."""
        if n > LIMIT:   # too many
            return 0

        return n


def run() -> None:
    text = "```"
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    shutil.copy(FIXTURE, tmp_path / "benchmarks" / "results" / "course.json")
    for chapter in ("01_no_cache", "02_kv_cache"):
        (tmp_path / "chapters" / chapter).mkdir(parents=True)
    (tmp_path / "toy.py").write_text(SOURCE)
    return tmp_path


def rendered(root: Path, text: str, page: str = "README.md") -> str:
    (root / page).write_text(text)
    render(root, check=False, current=no_hash)
    return (root / page).read_text()


def fails(root: Path, text: str, message: str, line: int = 2) -> None:
    """Rendering the page fails with the place and this message, checking too, and writes nothing."""
    (root / "README.md").write_text(f"# Title\n{text}\n")
    for check in (True, False):
        with pytest.raises(ValueError) as error:
            render(root, check, no_hash)
        assert str(error.value).startswith(f"README.md:{line} "), error.value
        assert message in str(error.value)
    assert (root / "README.md").read_text() == f"# Title\n{text}\n"


def test_a_table_of_chosen_rows(root):
    text = "a\n\n<!-- table: counters results=course rows=eager,nocache -->\nold\n<!-- end -->\n\nb\n"
    assert rendered(root, text) == """\
a

<!-- table: counters results=course rows=eager,nocache -->

**Counters: one throughput pass, the same on every machine**

| row | forward passes | tokens computed | KV bytes copied | KV bytes held |
|:--|--:|--:|--:|--:|
| liteinfer-nocache (2 prompts) | 16 | 316 | 0 B | 0 B |
| liteinfer-eager | 32 | 76 | 1.5 kB | 2.5 MB |

<!-- end -->

b
"""


def test_ratios_of_chosen_rows_still_know_the_rows_left_out(root):
    text = rendered(root, "<!-- table: latency results=course rows=eager -->\n<!-- end -->\n")
    assert "| liteinfer-eager | 110.0 (100.0..120.0) | 220.0 | 330.0 | 440.0 | 1,100 | 4.50x | 4.50x | - |" in text


@pytest.mark.parametrize(("name", "line"), [
    ("facts", "toy (134.5 M parameters, float32) · ISL 16"), ("latency", "| row | ITL p50 | ITL p95 |"),
    ("throughput", "| row | tok/s | req/s |"), ("ceilings", "| row | bound | ceiling ms |")])
def test_every_table_has_a_name(root, name, line):
    assert f"\n{line}" in rendered(root, f"<!-- table: {name} results=course -->\n<!-- end -->\n")


def test_the_ladder_links_its_chapters_from_where_the_page_is(root):
    text = "<!-- table: ladder results=course -->\n<!-- end -->\n"
    assert ("| liteinfer-eager | [2](chapters/02_kv_cache/) | transformers' model and its DynamicCache | "
            "liteinfer-nocache | 9.0 | 110.0 | 4.50x |") in rendered(root, text)
    inner = rendered(root, text, "chapters/01_no_cache/README.md")
    assert "[2](../02_kv_cache/)" in inner and "[1](./)" in inner
    assert "| liteinfer-native-eager | 3 |" in inner   # neither a page nor a measurement
    assert "| - | - | - |" in next(line for line in inner.splitlines() if "| liteinfer-native-eager | 3 |" in line)
    assert "| needs CUDA | - | - |" in next(line for line in inner.splitlines() if "| liteinfer-paged-triton |" in line)


def test_the_ladder_shows_figures_where_a_row_with_needs_was_measured(root):
    file = root / "benchmarks/results/course.json"
    file.write_text(file.read_text().replace('"name": "liteinfer-eager"', '"name": "liteinfer-paged-triton"'))
    line = next(line for line in rendered(root, "<!-- table: ladder results=course -->\n<!-- end -->\n").splitlines()
                if "| liteinfer-paged-triton |" in line)
    assert line.endswith("| 9.0 | 110.0 | 4.50x |")


def test_a_row_that_was_skipped_may_be_named_and_is_a_note(root):
    file = root / "benchmarks/results/course.json"
    result = json.loads(file.read_text())
    file.write_text(json.dumps(result | {"skipped": [
        {"name": "liteinfer-paged-triton", "width": 1, "reason": "needs CUDA"}]}))
    text = rendered(root, "<!-- table: latency results=course rows=eager,paged-triton -->\n<!-- end -->\n")
    assert "| liteinfer-eager |" in text and "liteinfer-paged-triton was not run: needs CUDA." in text
    assert "not run" not in rendered(root, "<!-- table: latency results=course rows=eager -->\n<!-- end -->\n")


def test_the_ladder_needs_no_results(root):
    text = rendered(root, "<!-- table: ladder -->\n<!-- end -->\n")
    assert "| liteinfer-nocache | [1](chapters/01_no_cache/) | no KV cache" in text


@pytest.mark.parametrize(("what", "code"), [
    ("Engine.step", '@functools.cache\ndef step(self, n: int) -> int:\n    """One step."""\n'
                    "    if n > LIMIT:   # too many\n        return 0\n\n    return n"),
    ("LIMIT", "LIMIT = 8   # tokens"),
    ('from="def step" to="return 0"', 'def step(self, n: int) -> int:\n    """One step."""\n'
                                      "    if n > LIMIT:   # too many\n        return 0"),
])
def test_code_is_quoted_verbatim_without_its_indentation(root, what, code):
    marker = f"<!-- code: toy.py {what} -->\n"
    assert rendered(root, marker + "<!-- end -->\n") == f"{marker}```python\n{code}\n```\n<!-- end -->\n"


def test_code_that_holds_a_fence_gets_a_longer_one(root):
    assert "````python\ndef run() -> None:\n    text = \"```\"\n````\n" in rendered(
        root, "<!-- code: toy.py run -->\n<!-- end -->\n")


@pytest.mark.parametrize(("words", "text"), [
    ("row=nocache latency.itl_p50_ms .0f", "500"),
    ("row=liteinfer-nocache counters.tokens_computed ,d", "316"),
    ("machine.bandwidth_gb_s .1f", "18.0"),
    ("model.parameters ,d", "134,515,008"),
    ("model.weight_bytes MB", "538.1 MB"),
    ("model.weight_bytes .0fMiB", "513 MiB"),
    ("machine.name s", "Toy CPU, 2 cores"),
    ("ratio=throughput.tok_s row=eager over=nocache .1f", "4.5"),
    ("ratio=latency.itl_p50_ms row=eager over=native-packed .2f", "2.00"),
    ("ratio=counters.forward_passes row=eager over=native-packed .1f", "1.0"),
])
def test_a_value_in_prose(root, words, text):
    marker = f"<!--v: results=course {words}-->"
    assert rendered(root, f"It is {marker}?<!--/v--> here, {marker}<!--/v-->.\n") == (
        f"It is {marker}{text}<!--/v--> here, {marker}{text}<!--/v-->.\n")


def test_a_ratio_of_rows_not_measured_alike_says_so(root):
    marker = "<!--v: results=course ratio=throughput.tok_s row=eager over=nocache .1f-->"
    (root / "README.md").write_text(f"{marker}<!--/v-->")
    render(root, check=False, current=lambda name: "changed" if name == "liteinfer-eager" else "aaaa")
    assert "-->~4.5<!--" in (root / "README.md").read_text()


PAGE = """\
# Page
<!-- table: throughput results=course -->
<!-- end -->

<!-- code: toy.py Engine -->
<!-- end -->
It took <!--v: results=course row=eager latency.itl_p50_ms .0f--><!--/v--> ms.

```
<!-- table: none of this is read -->
<!--v: nor this
```
"""


def test_rendering_twice_changes_nothing_more(root):
    once = rendered(root, PAGE)
    assert render(root, check=True, current=no_hash) == []
    assert render(root, check=False, current=no_hash) == []
    assert (root / "README.md").read_text() == once
    assert once.endswith(PAGE[PAGE.index("```\n<!-- table: none"):])


@pytest.mark.parametrize(("file", "old", "new", "stale"), [
    ("benchmarks/results/course.json", '"req_s": 2.25', '"req_s": 2.5', "table throughput results=course"),
    ("toy.py", "# too many", "# far too many", "code toy.py Engine"),
    ("README.md", "-->110<!--", "-->111<!--", "value results=course row=eager latency.itl_p50_ms .0f"),
    ("README.md", "| 2.25 |", "| 9.25 |", "table throughput results=course"),
    ("README.md", "return n\n", "return  n\n", "code toy.py Engine"),
])
def test_check_finds_each_stale_place_and_writes_nothing(root, file, old, new, stale):
    rendered(root, PAGE)
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))
    before = (root / "README.md").read_text()
    line = next(i for i, text in enumerate(before.splitlines(), 1) if stale.split(" ", 1)[1] in text)
    assert render(root, check=True, current=no_hash) == [f"README.md:{line} {stale}"]
    assert (root / "README.md").read_text() == before
    assert render(root, check=False, current=no_hash) == [f"README.md:{line} {stale}"]
    assert render(root, check=True, current=no_hash) == []


def test_a_row_whose_code_has_changed_makes_its_tables_stale(root):
    rendered(root, PAGE)
    found = render(root, check=True, current=lambda name: "changed")
    assert "README.md:2 table throughput results=course" in found
    rows = [line for line in found if line.startswith("benchmarks/results/course.json row ")]
    assert len(rows) == len(found) - 1 > 0 and all(line.endswith("is stale: its code has changed") for line in rows)
    render(root, check=False, current=lambda name: "changed")   # marked in the tables, and still no good
    assert render(root, check=True, current=lambda name: "changed") == rows


@pytest.mark.parametrize("page", ["chapters/01_no_cache/README.md", "chapters/glossary.md"])
def test_pages_of_the_chapters_are_read(root, page):
    (root / page).write_text(PAGE)
    assert [place.split()[0] for place in render(root, check=True, current=no_hash)] == [
        f"{page}:2", f"{page}:5", f"{page}:7"]


@pytest.mark.parametrize(("marker", "message"), [
    ("table: latancy results=course", "unknown table 'latancy'"),
    ("table: latency", "results=name is missing"),
    ("table: latency results=course rows=nocash", "unknown row 'nocash'"),
    ("table: latency results=course rows=native-eager", "row 'native-eager' was not measured in these results"),
    ("table: waste results=course", "none of these results is of the kind 'kv_memory'"),
    ("table: latency results=course row=eager", "unknown option 'row'; there are results, rows, drafts"),
    ("table: latency results=other",
     "`python -m benchmarks store benchmarks/results/local/quick.json benchmarks/results/other.json`"),
    ("code: toy.py Engine.stop", "no 'stop' to quote in 'Engine.stop'"),
    ("code: toys.py Engine", "no such file to quote from"),
    ("code: toy.py", "a code marker takes a file and a name"),
    ('code: toy.py from="return" to="n"', "is on 2 lines, it must be on one"),
    ('code: toy.py from="def step" to="return 7"', "to='return 7' is on no line from 11 on"),
])
def test_a_block_that_means_nothing_is_an_error_with_its_place(root, marker, message):
    fails(root, f"<!-- {marker} -->\n<!-- end -->", message)


@pytest.mark.parametrize(("words", "message"), [
    ("row=nocash latency.itl_p50_ms .0f", "unknown row 'nocash'"),
    ("row=native-eager latency.itl_p50_ms .0f", "row 'native-eager' was not measured"),
    ("row=eager latency.itl_p51_ms .0f", "no value at 'latency.itl_p51_ms' of row liteinfer-eager"),
    ("row=eager latency .0f", "no value at 'latency'"),
    ("row=eager width=4 latency.itl_p50_ms .0f", "row 'eager' is there at width 1: say which with width="),
    ("machine.gpu s", "no value at 'machine.gpu'"),
    ("row=eager latency.itl_p50_ms ,d", "110.0 cannot be written as ',d'"),
    ("row=eager latency.itl_p50_ms", "a value takes a path and a format"),
    ("ratio=throughput.tok_s row=eager .1f", "a ratio takes ratio=path row=name over=name and a format"),
    ("ratio=throughput.tok row=eager over=nocache .1f", "no ratio of 'throughput.tok'"),
    ("ratio=counters.tokens_computed row=nocache over=eager .1f",
     "counters.tokens_computed of liteinfer-nocache counts 2 prompts, of liteinfer-eager 4: no ratio"),
])
def test_a_value_that_means_nothing_is_an_error_with_its_place(root, words, message):
    fails(root, f"It is <!--v: results=course {words}-->7<!--/v-->.", message)


@pytest.mark.parametrize(("text", "message", "line"), [
    ("<!-- table: facts results=course -->\nold", "the table has no <!-- end -->", 2),
    ("<!-- code: toy.py run -->\n<!-- table: facts results=course -->\n<!-- end -->", "the code has no", 2),
    ("<!-- tabel: facts results=course -->\n<!-- end -->", "without a table or code marker before it", 3),
    ("<!--v: results=course row=eager latency.itl_p50_ms .0f-->7", "must be whole and on one line", 2),
    ("7<!--/v-->", "must be whole and on one line", 2),
])
def test_a_marker_that_is_not_whole_is_an_error(root, text, message, line):
    fails(root, text, message, line)


def test_docs_are_current():
    """Apart from stale rows: a reader may change the code and still run the tests; `make release-check` may not."""
    assert render(ROOT, check=True, current=lambda name: None) == []


def test_pictures_are_current():
    """Byte for byte with the pinned matplotlib; with another one, which places text differently, that they exist."""
    changed = stale(write=False)
    if f"matplotlib=={matplotlib.__version__}" not in (ROOT / "constraints.txt").read_text():
        changed = [name for name in changed if not (ROOT / "chapters" / name).is_file()]
    assert changed == []
