"""Rotary position embeddings (Su et al. 2021), with Llama 3's scaling.

A head's D numbers are D/2 pairs. At position p, pair i is turned by the angle
p * inv_freq[i], so that a query and a key meet at the angle of their distance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liteinfer.loading import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair: [D / 2] float32.

    With rope_type "llama3" (Llama 3.1's long-context scaling), wavelengths
    beyond the original context are slowed by `factor`, short ones kept, and
    those between are blended.
    """
    exponents = torch.arange(0, config.head_size, 2).float() / config.head_size
    inv_freq = 1.0 / config.rope_theta**exponents                            # [D / 2]
    if config.rope_scaling is None:
        return inv_freq
    scaling = config.rope_scaling
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)  # within the old context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)                                                  # 1 keeps, 0 slows down
    return kept * inv_freq + (1 - kept) * inv_freq / scaling.factor


def cos_sin(inv_freq: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, 1, D] of positions [N], once for all layers of a step."""
    angles = positions[:, None].float() * inv_freq                           # [N, D / 2]
    angles = torch.cat((angles, angles), dim=-1)[:, None]                    # [N, 1, D]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head of x [N, heads, D]; pair i is (x[i], x[i + D / 2]), as checkpoints store it."""
    first, second = x.chunk(2, dim=-1)                                       # [N, heads, D / 2] each
    return x * cos + torch.cat((-second, first), dim=-1) * sin
