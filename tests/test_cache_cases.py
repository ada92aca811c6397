"""C1, C2, C4 and C6 on every cache: DynamicCache with transformers' model, ours with our forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from liteinfer.cache.contiguous import ContiguousCache
from liteinfer.cache.paged import GatherSdpa, PagedCache
from liteinfer.loading import LoadedModel
from liteinfer.model.layout import Layout
from liteinfer.model.linear import Packed, Plain
from liteinfer.model.llama import load_llama
from liteinfer.request import SamplingParams
from tests.conftest import build, outputs, rows

IDS = [7, 3, 51, 20, 20, 9, 44, 1, 62, 15, 33, 8]


class Backend(Protocol):
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Append ids; logits [L, V] at each of them."""

    def keep(self, n: int) -> None:
        """Forget all but the first n tokens."""

    def length(self) -> int: ...


class Dynamic:
    def __init__(self, model: LoadedModel) -> None:
        self.model, self.cache = model, DynamicCache()

    def feed(self, ids: Sequence[int]) -> Tensor:
        argument = {self.model.cache_keyword: self.cache}
        with torch.inference_mode():
            return self.model.transformers_model()(torch.tensor([ids]), use_cache=True, **argument).logits[0]

    def keep(self, n: int) -> None:
        self.cache = DynamicCache() if n == 0 else self.cache
        if n:
            self.cache.crop(n - self.length())   # transformers counts what to remove, as a negative number

    def length(self) -> int:
        return self.cache.get_seq_length()


class Contiguous:
    """Sequence 1 of 3, so that the cache's other rows lie around it."""

    def __init__(self, model: LoadedModel, linear: Plain | Packed) -> None:
        self.llama = load_llama(model, linear)
        self.cache = ContiguousCache(model.config, 3, 32, model.dtype, model.device)
        self.cache.keys.fill_(float("nan"))     # nobody may read a row that was not written
        self.cache.values.fill_(float("nan"))

    def feed(self, ids: Sequence[int]) -> Tensor:
        layout = Layout.of([(1, self.length(), len(ids))], torch.device("cpu"))
        self.cache.begin(layout)
        with torch.inference_mode():
            return self.llama(torch.tensor(ids), layout.positions, self.cache, torch.arange(len(ids)))

    def keep(self, n: int) -> None:
        if n:
            self.cache.truncate(1, n)
        else:
            self.cache.free(1)

    def length(self) -> int:
        return self.cache.lengths[1]


class Paged:
    """Sequence 1, in blocks scattered among those of another; every slot not written is NaN (G2)."""

    def __init__(self, model: LoadedModel, block_size: int) -> None:
        self.llama = load_llama(model, Plain())
        self.cache = PagedCache(model.config, 64, block_size, model.dtype, model.device, GatherSdpa())
        self.cache.keys.fill_(float("nan"))
        self.cache.values.fill_(float("nan"))
        self.neighbour = 0

    def feed(self, ids: Sequence[int]) -> Tensor:
        self.neighbour += 1
        self.cache.reserve(0, self.neighbour)      # takes a block now and then, so that ours do not lie in a row
        self.cache.reserve(1, self.length() + len(ids))
        layout = Layout.of([(1, self.length(), len(ids))], torch.device("cpu"))
        self.cache.begin(layout)
        with torch.inference_mode():
            logits = self.llama(torch.tensor(ids), layout.positions, self.cache, torch.arange(len(ids)))
        self.cache.check()
        return logits

    def keep(self, n: int) -> None:
        if n:
            self.cache.truncate(1, n)
        else:
            self.cache.free(1)
        self.cache.check()

    def length(self) -> int:
        return self.cache.lengths.get(1, 0)


@pytest.fixture(params=[pytest.param("dynamic", marks=pytest.mark.ch02),
                        pytest.param("contiguous", marks=pytest.mark.ch03),
                        pytest.param("contiguous-packed", marks=pytest.mark.ch03),
                        *(pytest.param(f"paged-{size}", marks=pytest.mark.ch04) for size in (1, 4, 16))])
def new(request: pytest.FixtureRequest, tiny: LoadedModel):
    """A function that makes an empty cache of this kind."""
    kind, _, size = request.param.partition("-")
    if kind == "paged":
        return lambda: Paged(tiny, int(size))
    return {"dynamic": lambda: Dynamic(tiny), "contiguous": lambda: Contiguous(tiny, Plain()),
            "contiguous-packed": lambda: Contiguous(tiny, Packed())}[request.param]


def whole(model: LoadedModel, ids: Sequence[int]) -> Tensor:
    """Logits [L, V] of one pass without any cache: the oracle."""
    with torch.inference_mode():
        return model.transformers_model()(torch.tensor([ids]), use_cache=False).logits[0]


def test_c1_prefill_with_a_cache_sees_no_future(new, tiny: LoadedModel) -> None:
    ids = IDS[:8]
    got = new().feed(ids)
    torch.testing.assert_close(got, whole(tiny, ids), rtol=0, atol=1e-5)
    other = new().feed([*ids[:7], (ids[7] + 1) % 64])
    assert torch.equal(got[:7], other[:7])
    assert not torch.equal(got[7], other[7])


@pytest.mark.parametrize("chunks", [(4, 5), (1, 8), (8, 1), (3, 3, 3), (2, 1, 6), (1,) * 9])
def test_c2_chunks_see_their_history(new, chunks: tuple[int, ...], tiny: LoadedModel) -> None:
    ids, backend, row = IDS[:9], new(), 0
    expected = whole(tiny, ids)
    for n in chunks:
        torch.testing.assert_close(backend.feed(ids[row:row + n]), expected[row:row + n], rtol=0, atol=1e-5)
        row += n


def test_c4_what_was_cropped_is_gone(new, tiny: LoadedModel) -> None:
    backend, tail = new(), [60, 2, 31, 31]
    backend.feed(IDS[:10])
    backend.keep(6)
    got = backend.feed(tail)
    torch.testing.assert_close(got, whole(tiny, IDS[:6] + tail)[6:], rtol=0, atol=1e-5)
    assert backend.length() == 10
    backend.keep(0)
    assert backend.length() == 0
    torch.testing.assert_close(backend.feed(tail[:3]), whole(tiny, tail[:3]), rtol=0, atol=1e-5)
    assert backend.length() == 3


@pytest.mark.parametrize("row", rows())
def test_c6_the_preallocated_size_changes_nothing(row: str, tiny_llama: LoadedModel) -> None:
    longest = outputs(build("nocache", tiny_llama), [IDS], SamplingParams(max_tokens=40))[0]
    for n in (20, 30, 40):
        exact = build(row, tiny_llama, max_model_len=len(IDS) + n)
        assert outputs(exact, [IDS], SamplingParams(max_tokens=n))[0] == longest[:n]
        with pytest.raises(ValueError, match=f"{len(IDS) + n + 1} is over max_model_len {len(IDS) + n}"):
            outputs(exact, [IDS], SamplingParams(max_tokens=n + 1))


@pytest.mark.ch03
def test_the_contiguous_cache_refuses_what_does_not_fit_and_stays_as_it_was(tiny_llama: LoadedModel) -> None:
    backend = Contiguous(tiny_llama, Plain())
    backend.feed(IDS)
    with pytest.raises(ValueError, match="needs 33 tokens, the cache holds 32"):
        backend.feed(IDS + IDS[:9])
    with pytest.raises(ValueError, match="holds 12 tokens, the step says 5"):
        backend.cache.begin(Layout.of([(1, 5, 1)], torch.device("cpu")))
    with pytest.raises(ValueError, match="truncate sequence 1 to 13 tokens, it holds 12"):
        backend.cache.truncate(1, 13)
    assert backend.length() == 12
    expected = whole(tiny_llama, IDS + IDS[:1])[-1:]
    torch.testing.assert_close(backend.feed(IDS[:1]), expected, rtol=0, atol=1e-5)


@pytest.mark.ch03
def test_sequences_of_one_step_do_not_see_each_other(tiny_llama: LoadedModel) -> None:
    """Three sequences, one decoding and two starting, in one ragged step."""
    llama = load_llama(tiny_llama, Plain())
    cache = ContiguousCache(tiny_llama.config, 3, 32, tiny_llama.dtype, tiny_llama.device)
    a, b, c = IDS[:5], IDS[5:8], IDS[8:]

    def step(*sequences: tuple[int, int, list[int]]) -> Tensor:
        layout = Layout.of([(seq, done, len(ids)) for seq, done, ids in sequences], torch.device("cpu"))
        assert layout.query_start_loc.diff().tolist() == [len(ids) for *_, ids in sequences]
        assert layout.seq_lens.tolist() == [done + len(ids) for _, done, ids in sequences]
        cache.begin(layout)
        flat = torch.tensor([i for *_, ids in sequences for i in ids])
        with torch.inference_mode():
            return llama(flat, layout.positions, cache, torch.arange(len(flat)))

    step((2, 0, a[:4]))
    got = step((2, 4, a[4:]), (0, 0, b), (1, 0, c))
    expected = torch.cat([whole(tiny_llama, a)[4:], whole(tiny_llama, b), whole(tiny_llama, c)])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    # And what each stored is still its own one step later, in another order.
    got = step((0, len(b), [11]), (1, len(c), [12]), (2, 5, [13]))
    expected = torch.cat([whole(tiny_llama, [*ids, new])[-1:] for ids, new in ((b, 11), (c, 12), (a, 13))])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
