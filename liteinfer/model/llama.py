"""Our own forward of the Llama and Qwen2 architectures.

Token-major: hidden states are [N, E] for all N tokens of a step, whoever they
belong to. The model knows nothing of sequences; at each layer it hands queries,
keys and values to the cache, and the cache does the attending.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from liteinfer.loading import LoadedModel, ModelConfig
from liteinfer.model.linear import Linear, LinearMaker
from liteinfer.model.rope import cos_sin, inverse_frequencies, rotate


class Cache(Protocol):
    """What the model needs of a cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [N, K, D] of this step; return the attention output [N, H, D] of q [N, H, D]."""


class Layer:
    """One decoder layer's weights, as linear layers ready to call."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, linear: LinearMaker) -> None:
        def make(*names: str) -> Linear:
            return linear([weights[f"{prefix}{name}.weight"] for name in names],
                          [weights.get(f"{prefix}{name}.bias") for name in names])

        self.qkv = make("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.o = make("self_attn.o_proj")
        self.gate_up = make("mlp.gate_proj", "mlp.up_proj")
        self.down = make("mlp.down_proj")
        self.input_norm = weights[f"{prefix}input_layernorm.weight"]         # [E]
        self.mlp_norm = weights[f"{prefix}post_attention_layernorm.weight"]  # [E]


class Llama:
    """A decoder-only transformer over a cache.

    Args:
        config: the architecture's numbers.
        weights: tensors under their transformers names; shared, not copied, by a plain `linear`.
        linear: how linear layers are made from weights.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], linear: LinearMaker) -> None:
        self.config = config
        self.embedding = weights["model.embed_tokens.weight"]                # [V, E]
        self.layers = [Layer(weights, f"model.layers.{i}.", linear) for i in range(config.num_layers)]
        self.norm = weights["model.norm.weight"]                             # [E]
        head = self.embedding if config.tie_word_embeddings else weights["lm_head.weight"]
        self.head = linear([head], [None])
        self.inv_freq = inverse_frequencies(config).to(self.embedding.device)

    def __call__(self, ids: Tensor, positions: Tensor, cache: Cache, logits_at: Tensor) -> Tensor:
        """One step: ids [N] at positions [N]; logits [M, V] of the rows `logits_at` [M]."""
        return self.logits(self.hidden_states(ids, positions, cache)[logits_at])

    def hidden_states(self, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """The last layer's output [N, E], before the final norm. Writes this step's keys and values."""
        heads = (-1, self.config.head_size)
        cos, sin = cos_sin(self.inv_freq, positions, self.embedding.dtype)   # [N, 1, D]
        x = F.embedding(ids, self.embedding)                                 # [N, E]
        for i, layer in enumerate(self.layers):
            q, k, v = (y.unflatten(-1, heads) for y in layer.qkv(self._normed(x, layer.input_norm)))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)                  # [N, H, D], [N, K, D]
            attended = cache.attend(i, q, k, v)                              # [N, H, D]
            x = x + layer.o(attended.flatten(-2))[0]
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm))        # [N, I] each
            x = x + layer.down(F.silu(gate) * up)[0]
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, V] of hidden states [M, E]."""
        return self.head(self._normed(hidden, self.norm))[0]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def load_llama(model: LoadedModel, linear: LinearMaker) -> Llama:
    """The model's forward with this kind of linear layers, made once and shared by all rows."""
    def build() -> Llama:
        weights = model.weights_to_copy() if linear.copies else model.weights()
        return Llama(model.config, weights, linear)

    return model.once(f"llama-{linear.name}", build)
