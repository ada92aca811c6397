"""`liteinfer chat`: streaming, several turns, commands, and Ctrl-C that stops the answer and not the program."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import SimpleNamespace

import pytest

from liteinfer.llm import LLM, Delta
from liteinfer.loading import LoadedModel
from liteinfer.request import SamplingParams
from liteinfer.terminal import Conversation


class Talker:
    """Stands in for LLM: answers "you said N messages", a word a step; may be interrupted or fail."""

    def __init__(self) -> None:
        self.heard: list[list[dict]] = []
        self.closed = 0
        self.trouble: Callable[[], None] = lambda: None
        self.row = SimpleNamespace(name="a-row")
        self.model = SimpleNamespace(name="a-model", encode_chat=self._encode)

    def _encode(self, messages: list[dict]) -> list[int]:
        self.heard.append(messages)
        return [1]

    def stream(self, prompt: list[int], params: SamplingParams) -> Generator[Delta, None, None]:
        if len(self.heard[-1]) > 7:
            raise ValueError("too long")
        return self._words()

    def _words(self) -> Generator[Delta, None, None]:
        try:
            yield Delta(0, "you ", (1,))
            self.trouble()
            yield Delta(0, f"said {len(self.heard[-1])}", (2, 3), "length")
        finally:
            self.closed += 1


def talk(monkeypatch: pytest.MonkeyPatch, talker: Talker, *lines: str | type[BaseException], **settings) -> None:
    """Run the loop on these lines, then Ctrl-D. An exception among them is raised at the prompt."""
    waiting = [*lines, EOFError]

    def read(prompt: str) -> str:
        line = waiting.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    Conversation(talker, SamplingParams(), **settings).loop()
    assert waiting == [], "the loop ended before its input did"


def test_several_turns_and_reset(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talker = Talker()
    talk(monkeypatch, talker, "hello", "", "again", "/reset", "new", system="be brief")
    system = {"role": "system", "content": "be brief"}
    first = [system, {"role": "user", "content": "hello"}]
    assert talker.heard == [
        first, [*first, {"role": "assistant", "content": "you said 2"}, {"role": "user", "content": "again"}],
        [system, {"role": "user", "content": "new"}]]
    out = capsys.readouterr().out
    assert "you said 2\n" in out and "you said 4\n" in out and "(forgotten)" in out
    assert "TTFT" not in out and talker.closed == 3


def test_times_are_shown_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talk(monkeypatch, Talker(), "one", "/stats", "two", "/stats", "three", "/what")
    out = capsys.readouterr().out
    assert out.count("(TTFT ") == 1 and "tok/s after it, 3 tokens)" in out
    assert out.count("Ctrl-C stops an answer") == 2   # at the start, and for a command there is not


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    talker = Talker()

    def interrupt() -> None:
        talker.trouble = lambda: None
        raise KeyboardInterrupt

    talker.trouble = interrupt
    talk(monkeypatch, talker, KeyboardInterrupt, "hello", "go on")
    assert talker.heard[1][1] == {"role": "assistant", "content": "you "}
    assert talker.closed == 2
    out = capsys.readouterr().out
    assert "you  (stopped)" in out and "you said 3" in out


def test_a_conversation_that_grew_too_long_says_so(monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    talker = Talker()
    talk(monkeypatch, talker, "1", "2", "3", "4", "5", "/reset", "6")
    printed = capsys.readouterr()
    assert printed.err == "too long (/reset forgets the conversation)\n"
    assert len(talker.heard[4]) == 9 and len(talker.heard[5]) == 1


def test_with_the_real_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                             smol: LoadedModel) -> None:
    llm = LLM(smol)
    message = {"role": "user", "content": "Say hello."}
    expected = llm.chat([message], SamplingParams(max_tokens=5)).text
    monkeypatch.setattr("builtins.input", lambda _, lines=["Say hello.", "/exit"]: lines.pop(0))
    conversation = Conversation(llm, SamplingParams(max_tokens=5))
    conversation.loop()
    assert expected.strip() and expected in capsys.readouterr().out
    assert conversation.messages == [message, {"role": "assistant", "content": expected}]
    assert not llm.engine.has_unfinished()
