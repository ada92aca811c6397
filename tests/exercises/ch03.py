"""Chapter 3: wrong answers that students give, each of which its check must refuse."""

from __future__ import annotations

TURN = '''
def apply_rope(q, k, v, positions, theta):
    size = q.shape[-1]
    inv_freq = theta ** (-torch.arange(0, size, 2, dtype=q.dtype) / size)
    angles = (positions[:, None] * inv_freq)[:, None]
    cos, sin = angles.cos(), angles.sin()

    def turn(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return turn(q), turn(k), v
'''

LAYOUT = '''
def flat_layout(sequences):
    query_start_loc = [0]
    for _, new in sequences:
        query_start_loc.append(query_start_loc[-1] + new)
    positions = [p for context, new in sequences for p in range(context, context + new)]
    return query_start_loc, positions, [context + new for context, new in sequences]
'''

FUSE = '''
def fuse(weights, biases):
    bias = None if biases[0] is None else torch.cat(biases)
    return torch.cat(weights), bias, [w.shape[0] for w in weights]
'''

CEILING = '''
def decode_ceiling(config, itemsize, context, gb_per_s):
    c = config
    q, kv = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
    layer = c.hidden_size * (2 * q + 2 * kv) + 3 * c.hidden_size * c.intermediate_size
    numbers = c.num_layers * (layer + 2 * kv * context) + c.vocab_size * c.hidden_size
    n_bytes = numbers * itemsize
    return n_bytes, n_bytes / (gb_per_s * 1e9) * 1000
'''


def but(right: str, old: str, new: str) -> str:
    """The right answer with one thing changed."""
    assert right.count(old) == 1, f"{old!r} stands {right.count(old)} times in the answer"
    return right.replace(old, new)


WRONG: dict[str, list[tuple[str, str]]] = {
    "3.1": [
        ("neighbours as pairs", but(
            but(TURN, "a, b = x.chunk(2, dim=-1)", "a, b = x[..., ::2], x[..., 1::2]"),
            "torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)",
            "torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)")),
        ("turned the other way", but(TURN, "angles.sin()", "-angles.sin()")),
        ("values turned too", but(TURN, "turn(k), v", "turn(k), turn(v)")),
        ("keys not turned", but(TURN, "turn(k), v", "k, v")),
        ("frequencies -i / D", but(TURN, "torch.arange(0, size, 2, dtype=q.dtype)",
                                   "torch.arange(size // 2, dtype=q.dtype)")),
        ("positions from 1", but(TURN, "positions[:, None] *", "(positions[:, None] + 1) *")),
    ],
    "3.2": [
        ("positions restart at 0", but(LAYOUT, "range(context, context + new)", "range(new)")),
        ("the last entry is missing", but(LAYOUT, "return query_start_loc,", "return query_start_loc[:-1],")),
        ("seq_lens without the context", but(LAYOUT, "[context + new for", "[new for")),
        ("starts that count the context", but(
            but(LAYOUT, "for _, new in", "for context, new in"),
            "query_start_loc[-1] + new)", "query_start_loc[-1] + context + new)")),
        ("starts not summed", but(LAYOUT, "query_start_loc[-1] + new", "new if len(query_start_loc) == 1 else "
                                  "query_start_loc[1] + new")),
    ],
    "3.3": [
        ("equal thirds", but(FUSE, "[w.shape[0] for w in weights]",
                             "[sum(w.shape[0] for w in weights) // len(weights)] * len(weights)")),
        ("joined along the input", but(FUSE, "torch.cat(weights)", "torch.cat(weights, dim=1)")),
        ("biases dropped", but(FUSE, "None if biases[0] is None else torch.cat(biases)", "None")),
        ("only the first bias", but(
            FUSE, "torch.cat(biases)", "torch.cat([biases[0], *[torch.zeros_like(b) for b in biases[1:]]])")),
        ("weights joined in another order", but(FUSE, "torch.cat(weights),", "torch.cat([*weights[1:], weights[0]]),")),
    ],
    "3.4": [
        ("the embedding besides a tied head", but(CEILING, "+ c.vocab_size * c.hidden_size",
                                                  "+ 2 * c.vocab_size * c.hidden_size")),
        ("a tied head costs nothing", but(CEILING, "+ c.vocab_size * c.hidden_size",
                                          "+ (0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size)")),
        ("bits for bytes", but(CEILING, "numbers * itemsize", "numbers * itemsize * 8")),
        ("a GB of 2**30", but(CEILING, "1e9", "2**30")),
        ("keys without values", but(CEILING, "2 * kv * context", "kv * context")),
        ("query heads in the cache", but(CEILING, "2 * kv * context", "2 * q * context")),
        ("seconds for milliseconds", but(CEILING, "* 1000", "")),
    ],
}
