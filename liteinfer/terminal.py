"""A conversation in the terminal: `liteinfer chat`."""

from __future__ import annotations

import sys
import time

from liteinfer.llm import LLM
from liteinfer.request import SamplingParams

HELP = "/reset forgets the conversation, /stats shows or hides times, /exit (or Ctrl-D) ends. Ctrl-C stops an answer."


class Conversation:
    """Messages so far, and a loop that reads one and streams the answer."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None, stats: bool = False) -> None:
        self.llm, self.params, self.stats = llm, params, stats
        self.first = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.first)

    def loop(self) -> None:
        """Read and answer until the user ends it."""
        print(f"{self.llm.model.name} on {self.llm.row.name}. {HELP}")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit ends)")
                continue
            if line == "/exit":
                return
            self.take(line)

    def take(self, line: str) -> None:
        """One line of the user: a command, or a message to answer."""
        if line == "/reset":
            self.messages = list(self.first)
            print("(forgotten)")
        elif line == "/stats":
            self.stats = not self.stats
            print(f"(times {'shown' if self.stats else 'hidden'})")
        elif line.startswith("/"):
            print(HELP)
        elif line:
            self.answer(line)

    def answer(self, message: str) -> None:
        """Stream the answer. What was said before a Ctrl-C stays in the conversation; a refused message does not."""
        messages = [*self.messages, {"role": "user", "content": message}]
        begin, first, tokens, text = time.perf_counter(), None, 0, ""
        deltas = None
        try:
            deltas = self.llm.stream(self.llm.model.encode_chat(messages), self.params)
            for delta in deltas:
                tokens += len(delta.token_ids)
                first = first if first is not None or not tokens else time.perf_counter()
                text += delta.text
                print(delta.text, end="", flush=True)
                if delta.error:
                    print(f"\n{delta.error}", file=sys.stderr)
                    return
        except ValueError as error:   # the conversation has grown too long, or the model's template refuses it
            print(f"{error} (/reset forgets the conversation)", file=sys.stderr)
            return
        except KeyboardInterrupt:
            if deltas is not None:
                deltas.close()
            print(" (stopped)", end="")
        print()
        self.messages = [*messages, {"role": "assistant", "content": text}]
        if self.stats and first is not None:
            rate = (tokens - 1) / (time.perf_counter() - first) if tokens > 1 else 0.0
            print(f"(TTFT {(first - begin) * 1000:.0f} ms, {rate:.1f} tok/s after it, {tokens} tokens)")
