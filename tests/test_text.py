"""Words in, words out: T1, T3, T5, T6, T10 and B6's text, streamed and not, and log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from liteinfer import LLM, SamplingParams
from liteinfer.detokenizer import Detokenizer, StopStrings
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.request import Request
from tests.conftest import replace_pass, rows

Decode = Callable[[Sequence[int]], str]
PIECES = ["👩‍🔬", "naïve", "日本語", "🇳🇴", " Hello  world ,\n  x", "e\u0323\u0301", "שלום", "مرحبا بالعالم",
          "def f(x):\n\treturn x**2", "\u200d", "  ", "\n\n", "😀", "नमस्ते", "a", "\ufffd", "𝔘", "Σ≤∞", "e\u0301",
          "\u200f", "ﷺ", "0x1F", "👨‍👩‍👧‍👦"]


@pytest.fixture(scope="module")
def byte_level(smol: LoadedModel) -> Decode:
    return smol.decode


@pytest.fixture(scope="module")
def sentencepiece() -> Decode:
    """A tokenizer of the other family: words carry their space in front, unknown characters fall back to bytes."""
    vocabulary = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}}
    for word in ("▁Hello", "▁world", "▁", "Hello", "x", "▁naïve", "日本", "é", ",", "▁▁"):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return lambda ids: tokenizer.decode(list(ids))


def pieces_of(ids: Sequence[int], decode: Decode) -> tuple[list[str], str, int]:
    """The text fed token by token; what the flush gives; the longest window that was ever decoded."""
    longest = 0

    def noted(window: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(window))
        return decode(window)

    detokenizer = Detokenizer(noted)
    pieces = [detokenizer.feed(i) for i in ids]
    return pieces, detokenizer.flush(), longest


def random_texts(smol: LoadedModel) -> list[list[int]]:
    """300: made of hard pieces; the same with foreign tokens thrown in; bytes that are no UTF-8."""
    rng, texts = random.Random(0), []
    single_bytes = [i for i in range(smol.config.vocab_size) if len(smol.tokenizer.convert_ids_to_tokens(i)) == 1][:256]
    for n in range(300):
        text = "".join(rng.choice(PIECES) + rng.choice(["", " "]) for _ in range(rng.randint(1, 6)))
        ids = smol.tokenizer(text, add_special_tokens=False)["input_ids"]
        if n % 3 == 1:
            for _ in range(3):
                ids.insert(rng.randrange(len(ids) + 1), rng.randrange(smol.config.vocab_size))
        if n % 3 == 2:
            ids = [rng.choice(single_bytes) for _ in range(rng.randint(1, 25))]
        texts.append(ids)
    return texts


def test_300_texts_stream_as_their_whole_decode_for_every_cut(smol: LoadedModel, byte_level: Decode) -> None:
    for ids in random_texts(smol):
        detokenizer, given = Detokenizer(byte_level), ""
        for cut, token in enumerate(ids, 1):
            given += detokenizer.feed(token)
            whole = byte_level(ids[:cut])
            assert whole.startswith(given)
            held = whole[len(given):]
            assert held in ("", *("\ufffd" * n for n in (1, 2, 3))), f"{held!r} is held back and can no longer change"
            window, out = detokenizer._window, detokenizer._given   # a flush at every cut, without its end
            assert byte_level(window)[len(out):] == held


def test_the_other_tokenizer_family_too(sentencepiece: Decode) -> None:
    """Words that carry their space, and characters spelled in bytes, several in a row."""
    rng = random.Random(1)
    for _ in range(100):
        ids: list[int] = []
        for _ in range(rng.randint(1, 12)):
            spelled = rng.choice([piece for piece in PIECES if piece != "\ufffd"]).encode()
            ids += rng.choice([[rng.randrange(257, 267)], [byte + 1 for byte in spelled]])
        pieces, rest, _ = pieces_of(ids, sentencepiece)
        assert "".join(pieces) == sentencepiece(ids) and rest == ""


def test_broken_bytes_of_the_other_family_hold_nothing_up(sentencepiece: Decode) -> None:
    """Characters already out stay out, and the words behind the broken byte come at once."""
    face, words = [byte + 1 for byte in "😀".encode()], [257, 258, 257, 258] * 6
    pieces, rest, longest = pieces_of([*face, 0xFF + 1, *words], sentencepiece)
    assert pieces[3] == "😀" and pieces[4] == ""
    assert pieces[5] == "\ufffd Hello" and all(pieces[6:]) and rest == ""
    assert longest <= Detokenizer.LONGEST + 1
    rng = random.Random(2)
    for _ in range(100):
        ids = [rng.choice([rng.randrange(1, 257), rng.randrange(257, 267)]) for _ in range(200)]
        assert pieces_of(ids, sentencepiece)[2] <= Detokenizer.LIMIT + 1


def test_t1_no_replacement_character_inside_a_character(smol: LoadedModel) -> None:
    ids = smol.tokenizer("👩‍🔬 naïve 日本語 🇳🇴", add_special_tokens=False)["input_ids"]
    for cut in range(1, len(ids) + 1):
        pieces, rest, _ = pieces_of(ids[:cut], smol.decode)
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + rest == smol.decode(ids[:cut])
    assert rest == ""


def test_t3_spaces_are_kept(smol: LoadedModel, sentencepiece: Decode) -> None:
    ids = smol.tokenizer(" Hello  world ,\n  x", add_special_tokens=False)["input_ids"]
    pieces, rest, _ = pieces_of(ids, smol.decode)
    assert "".join(pieces) + rest == " Hello  world ,\n  x"


def test_the_work_per_token_is_bounded(smol: LoadedModel) -> None:
    """Also over a long run of bytes that never become a character."""
    flag = smol.tokenizer("🇳🇴", add_special_tokens=False)["input_ids"]
    for ids in (flag[:1] * 500, flag[1:2] * 500, smol.tokenizer("word " * 400)["input_ids"], flag * 200):
        pieces, rest, longest = pieces_of(ids, smol.decode)
        assert "".join(pieces) + rest == smol.decode(ids)
        assert longest <= Detokenizer.LONGEST + 4


@pytest.mark.parametrize(("stop", "text", "expected"), [
    (["END"], "abcENDdef", "abc"), (["END"], "abcEN", "abcEN"), (["END"], "EEND", "E"), (["aab"], "aaab", "a"),
    (["xyz", "b"], "abxyz", "a"), (["xyz", "cd"], "abxycd", "abxy"), (["x"], "x", ""), ([], "abc", "abc"),
    (["日本"], "a日日本", "a日"), (["abcabd"], "abcabcabd", "abc"),
    (["abcd", "bc"], "xabcd", "xa"), (["bc", "abc"], "xabc", "x"),
])
def test_stop_strings_cut_exactly_whatever_the_pieces(stop: list[str], text: str, expected: str) -> None:
    for cuts in range(2 ** (len(text) - 1)):
        matcher, out, piece = StopStrings(stop), "", ""
        for i, letter in enumerate(text):
            piece += letter
            if i == len(text) - 1 or cuts >> i & 1:
                given = matcher.feed(piece)
                out, piece = out + given, ""
                assert expected.startswith(out), "part of a stop string leaked"
                if matcher.found:
                    break
                held = matcher._held
                assert held == "" or any(s.startswith(held) for s in stop), f"{held!r} can be no stop"
        assert out + ("" if matcher.found else matcher.flush()) == expected
        assert matcher.found is any(s in text for s in stop)


# --- through LLM -----------------------------------------------------------------------------------------------


PROMPT = "The three primary colours are"


def streamed(llm: LLM, prompt: str, params: SamplingParams) -> tuple[list[str], list[int], str | None]:
    deltas = list(llm.stream(prompt, params))
    return [d.text for d in deltas], [t for d in deltas for t in d.token_ids], deltas[-1].finish_reason


@pytest.mark.parametrize("row", rows())
def test_t5_a_stop_string_across_two_tokens(row: str, smol: LoadedModel) -> None:
    llm = LLM(smol, row=row)
    plain = llm.generate(PROMPT, SamplingParams(max_tokens=10, ignore_eos=True))[0]
    texts = [smol.decode([token]) for token in plain.token_ids]
    i = next(i for i in range(2, 8) if len(texts[i]) >= 2 and len(texts[i + 1]) >= 2
             and plain.text.count(texts[i][-2:] + texts[i + 1][:2]) == 1)
    stop = texts[i][-2:] + texts[i + 1][:2]
    before = plain.text[:plain.text.index(stop)]
    params = SamplingParams(max_tokens=10, ignore_eos=True, stop=(stop,))
    done = llm.generate(PROMPT, params)[0]
    pieces, ids, reason = streamed(llm, PROMPT, params)
    assert done.text == "".join(pieces) == before
    assert done.finish_reason == reason == "stop"
    assert done.token_ids == ids == plain.token_ids[:i + 2]   # the token that completed it counts, none after it
    assert not llm.engine.has_unfinished()
    counters, passes = llm.engine.counters, 10 + 2 * (i + 2)
    if not counters.drafted_tokens:
        assert counters.forward_passes == passes, "the engine went on after the stop"
    else:                              # every pass gives one token of its own and the guesses it accepted; those that
        assert passes - counters.accepted_tokens <= counters.forward_passes < passes   # lie behind a stop are cut


class Scripted:
    """T6 and T10 without arithmetic: the logits put all weight on the next token of a script."""

    def __init__(self, smol: LoadedModel, row: str, script: list[int]) -> None:
        self.llm = LLM(smol, row=row)

        def scripted(_: object, requests: list[Request]) -> torch.Tensor:
            logits = torch.zeros(len(requests), smol.config.vocab_size)
            for row, request in zip(logits, requests, strict=True):
                row[script[len(request.output_token_ids)]] = 100.0
            return logits

        replace_pass(self.llm.engine, scripted)


@pytest.mark.parametrize("row", rows())
@pytest.mark.parametrize(("ending", "max_tokens", "reason"), [("eos", 20, "stop"), ("length", None, "length")])
def test_t6_text_held_as_a_possible_stop_is_delivered_at_the_end(row: str, ending: str, max_tokens: int | None,
                                                                 reason: str, smol: LoadedModel) -> None:
    ids = smol.encode("Do not STO")
    eos = list(smol.config.eos_token_ids)
    llm = Scripted(smol, row, ids + (eos if ending == "eos" else [])).llm
    params = SamplingParams(max_tokens=max_tokens or len(ids), stop=("STOPX",))
    done = llm.generate("x", params)[0]
    pieces, _, how = streamed(llm, "x", params)
    assert done.text == "".join(pieces) == "Do not STO"
    assert done.finish_reason == how == reason


@pytest.mark.parametrize("row", rows())
def test_t10_eos_at_the_last_token_and_as_the_first(row: str, smol: LoadedModel) -> None:
    eos, word = smol.config.eos_token_ids[0], smol.encode("word")
    exactly = Scripted(smol, row, [*word, eos]).llm.generate("x", SamplingParams(max_tokens=len(word) + 1))[0]
    assert (exactly.text, exactly.finish_reason, exactly.token_ids) == ("word", "stop", [*word, eos])
    at_once = Scripted(smol, row, [eos]).llm.generate("x", SamplingParams(max_tokens=5))[0]
    assert (at_once.text, at_once.finish_reason, at_once.token_ids) == ("", "stop", [eos])
    ignoring = Scripted(smol, row, [*word, eos, *word]).llm.generate(
        "x", SamplingParams(max_tokens=2 * len(word) + 1, ignore_eos=True))[0]
    assert (ignoring.text, ignoring.finish_reason) == ("wordword", "length")   # no special token's text
    declared = Scripted(smol, row, [*word, *smol.encode("!"), eos]).llm.generate(
        "x", SamplingParams(max_tokens=9, stop_token_ids=tuple(smol.encode("!"))))[0]
    assert (declared.text, declared.finish_reason) == ("word", "stop")


def test_a_character_cut_by_max_tokens_is_flushed(smol: LoadedModel) -> None:
    ids = smol.encode("ok 👩‍🔬")
    llm = Scripted(smol, "native-packed", ids).llm
    for n in range(1, len(ids) + 1):
        params = SamplingParams(max_tokens=n)
        assert "".join(streamed(llm, "x", params)[0]) == llm.generate("x", params)[0].text == smol.decode(ids[:n])


def test_a_closed_stream_leaves_nothing_running_and_two_at_once_are_refused(smol: LoadedModel) -> None:
    llm = LLM(smol)
    stream = llm.stream([PROMPT, PROMPT], SamplingParams(max_tokens=50))
    first = next(stream)
    assert first.index == 0 and len(first.token_ids) == 1
    with pytest.raises(RuntimeError, match="another stream"):
        next(llm.stream(PROMPT))
    stream.close()
    assert not llm.engine.has_unfinished()
    assert len(llm.generate(PROMPT, SamplingParams(max_tokens=2))[0].token_ids) == 2
    with pytest.raises(ValueError, match="empty"):
        llm.stream("")   # at once, not at the first step


def test_chat_uses_the_models_template(smol: LoadedModel) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    done = LLM(smol).chat(messages, SamplingParams(max_tokens=4))
    expected = smol.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True,
                                                  return_dict=False)
    assert done.prompt_token_ids == expected


@pytest.mark.parametrize("row", rows())
def test_logprobs_are_transformers_log_softmax(row: str, smol: LoadedModel) -> None:
    params = SamplingParams(max_tokens=3, logprobs=True, top_logprobs=4, temperature=0.7, top_k=5, seed=3)
    done = LLM(smol, row=row).generate(PROMPT, params)[0]
    ids = torch.tensor([done.prompt_token_ids + done.token_ids])
    with torch.inference_mode():
        every = smol.transformers_model()(ids, use_cache=False).logits[0].log_softmax(-1)
    assert len(done.logprobs) == len(done.token_ids) == 3
    for i, entry in enumerate(done.logprobs):
        row_of = every[len(done.prompt_token_ids) - 1 + i]
        assert entry.token_id == done.token_ids[i]
        assert entry.logprob == pytest.approx(float(row_of[entry.token_id]), abs=1e-4)
        best = row_of.topk(4)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [token for token, _ in entry.top] == best.indices.tolist()
    assert LLM(smol, row=row).generate(PROMPT, SamplingParams(max_tokens=2))[0].logprobs == []


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer, and tiny-llama has none"):
        LLM(tiny_model("llama")).generate([1], SamplingParams(stop="x"))
