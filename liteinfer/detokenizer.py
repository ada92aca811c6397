"""Token ids to text as they come.

A character may be spread over several tokens (an emoji is four bytes, often
three tokens), and a stop string may begin in one token and end in another. So
text is held back while it could still change, and no longer than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"   # what a decoder writes for bytes that are no character (yet)


class Detokenizer:
    """Turns one sequence's tokens into pieces of text, which join to the whole decode.

    `decode` maps token ids to text. Each call decodes a window of a few tokens: some that are
    done with, which give the spaces their context, and those whose text is not settled. A
    character that is cut off shows as U+FFFD at the end, one (byte-level BPE) or one for each of
    its at most 3 bytes (SentencePiece's byte fallback), so that many are held back.

    Byte fallback also turns the whole characters next to broken bytes into U+FFFD. Text that is
    out cannot be called back, so there alone a stream keeps characters that the whole decode loses.
    """

    CONTEXT = 4    # settled tokens kept in the window
    LONGEST = 12   # tokens in the window before a place to cut it is looked for
    LIMIT = 32     # tokens after which it is cut all the same: bytes that never become text

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = ""    # the part of the window's text that is out
        self._settled = 0   # how many of its tokens that text is, when no character was cut off

    def feed(self, token_id: int) -> str:
        """Take one token; return the text that is now certain, possibly none."""
        self._window.append(token_id)
        text, certain = self._text()
        if not certain.startswith(self._given):   # byte fallback, in the middle of the next character
            self._window, self._given, self._settled = self._window[self._settled:], "", 0
            text, certain = self._text()
        piece, self._given = certain[len(self._given):], certain
        if certain == text:
            self._settled = len(self._window)
        if len(self._window) > self.LONGEST:
            self._shorten(text)
        if len(self._window) > self.LIMIT:
            piece += self.flush()
            self._window, self._given, self._settled = [], "", 0
        return piece

    def flush(self) -> str:
        """The end: what was still held back."""
        text = self._decode(self._window)
        piece, self._given = text[len(self._given):], text
        return piece

    def _text(self) -> tuple[str, str]:
        """The window's text, and what of it no further token can change."""
        text = self._decode(self._window)
        unsettled = min(3, len(text) - len(text.rstrip(UNFINISHED)))
        return text, text[:len(text) - unsettled]

    def _shorten(self, text: str) -> None:
        """Drop tokens from the front, at a place between two characters.

        That is where the front does not end in U+FFFD, or where it does because its bytes
        really are no text: then both sides decode alone to what they decode to together.
        """
        pending = text[len(self._given):]
        for kept in range(self.CONTEXT, len(self._window)):
            front, tail = self._decode(self._window[:-kept]), self._decode(self._window[-kept:])
            between = text.startswith(front) and not front.endswith(UNFINISHED)
            if (between or front + tail == text) and len(tail) > len(pending) and tail.endswith(pending):
                self._settled = max(0, self._settled - (len(self._window) - kept))
                self._window = self._window[-kept:]
                self._given = tail[:len(tail) - len(pending)]
                return


class StopStrings:
    """Cuts a stream of text before the stop string that is complete first, and holds back what may become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def feed(self, piece: str) -> str:
        """Take more text; return what is certain not to belong to a stop string."""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.found, self._held = True, ""
            return text[:min(found)[1]]
        hold = next(n for n in range(len(text), -1, -1)
                    if n == 0 or any(stop.startswith(text[len(text) - n:]) for stop in self._stop))
        self._held = text[len(text) - hold:]
        return text[:len(text) - hold]

    def flush(self) -> str:
        """The end: what was held back did not become a stop string."""
        held, self._held = self._held, ""
        return held


class TextOutput:
    """One request's tokens to text: detokenized, and cut at a stop string.

    `n_tokens` counts the tokens that belong to the output: all of them, or those up to the
    one that completed a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._detokenizer, self._stop = Detokenizer(decode), StopStrings(stop)
        self.n_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: nothing more is to be fed."""
        return self._stop.found

    def feed(self, token_ids: Sequence[int], finish_reason: str | None) -> str:
        """Take an event's tokens; return the text that is certain. A token that stopped the request has no text."""
        text = ""
        for i, token in enumerate(token_ids):
            self.n_tokens += 1
            if finish_reason == "stop" and i == len(token_ids) - 1:
                break
            text += self._stop.feed(self._detokenizer.feed(token))
            if self._stop.found:
                return text
        if finish_reason is not None:
            text += self._stop.feed(self._detokenizer.flush())
            text += self._stop.flush()
        return text
