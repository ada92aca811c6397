"""Usual wrong answers to the exercises of chapter 2: (the misconception, the solution cell)."""

from __future__ import annotations

CACHE = '''
class OneLayerCache:
    def __init__(self) -> None:
        self.keys = self.values = None
        self.n = 0

    def __len__(self) -> int:
        return {length}

    def next_positions(self, n: int) -> Tensor:
        return {positions}

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.n += k.shape[2]
        self.keys = k if self.keys is None else torch.cat((self.keys, k), dim={dim})
        self.values = v if self.values is None else torch.cat((self.values, v), dim={dim})
        return self.keys, self.values

    def crop(self, n: int) -> None:
        {crop}
'''
RIGHT = {
    "length": "0 if self.keys is None else self.keys.shape[2]",
    "positions": "torch.arange(len(self), len(self) + n)",
    "dim": "2",
    "crop": "self.keys, self.values = self.keys[:, :, :n], self.values[:, :, :n]",
}


def cache(**changed: str) -> str:
    """The solution of 2.2 with one of its parts changed."""
    return CACHE.format(**RIGHT | changed)


def per_token(expression: str) -> str:
    return f"def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:\n    return {expression}\n"


def mask(expression: str) -> str:
    return f"def causal_mask(new: int, total: int) -> Tensor:\n    return {expression}\n"


def copied(expression: str) -> str:
    return f"def bytes_copied(prompt: int, output: int, per_token: int) -> int:\n    return {expression}\n"


WRONG: dict[str, list[tuple[str, str]]] = {
    "2.1": [
        ("query heads are cached", per_token(
            "2 * config.num_layers * config.num_heads * config.head_size * dtype.itemsize")),
        ("only keys are cached", per_token(
            "config.num_layers * config.num_kv_heads * config.head_size * dtype.itemsize")),
        ("hidden_size numbers are cached", per_token("2 * config.num_layers * config.hidden_size * dtype.itemsize")),
        ("a number is always 4 bytes", per_token("2 * config.num_layers * config.num_kv_heads * config.head_size * 4")),
        ("one layer only", per_token("2 * config.num_kv_heads * config.head_size * dtype.itemsize")),
    ],
    "2.2": [
        ("concatenates along the heads", cache(dim="1")),
        ("concatenates along the batch", cache(dim="0")),
        ("crop moves a counter and keeps the old keys", cache(length="self.n", crop="self.n = n")),
        ("crop keeps the last n", cache(crop="self.keys, self.values = self.keys[:, :, -n:], self.values[:, :, -n:]")),
        ("crop removes n", cache(crop="self.keys, self.values = self.keys[:, :, :-n], self.values[:, :, :-n]")),
        ("crop forgets the keys only", cache(crop="self.keys = self.keys[:, :, :n]")),
        ("positions restart at 0", cache(positions="torch.arange(n)")),
        ("positions start at 1", cache(positions="torch.arange(len(self) + 1, len(self) + n + 1)")),
    ],
    "2.3": [
        ("the triangle at the top left", mask("torch.ones(new, total, dtype=torch.bool).tril()")),
        ("a token does not see itself", mask("torch.ones(new, total, dtype=torch.bool).tril(total - new - 1)")),
        ("a token sees the next one", mask("torch.ones(new, total, dtype=torch.bool).tril(total - new + 1)")),
        ("no mask is needed with a cache", mask("torch.ones(new, total, dtype=torch.bool)")),
        ("True means hidden", mask("~torch.ones(new, total, dtype=torch.bool).tril(total - new)")),
    ],
    "2.4": [
        ("the last token is fed too", copied("per_token * sum(range(prompt, prompt + output))")),
        ("the new token is copied too", copied("per_token * sum(range(prompt + 1, prompt + output))")),
        ("the prompt is not copied", copied("per_token * sum(range(output))")),
        ("every step copies the prompt only", copied("per_token * prompt * (output - 1)")),
        ("only what is held at the end", copied("per_token * (prompt + output - 1)")),
    ],
}
