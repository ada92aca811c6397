"""How many blocks a pool should have: as many as it was told, or as memory allows."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from liteinfer.cache.block_pool import BlockPool
from liteinfer.loading import LoadedModel

RAM_SHARE, CUDA_SHARE = 1 / 8, 0.9   # of all RAM; of the GPU memory that is free once the weights are there


@dataclass(frozen=True)
class PoolSize:
    """A number of blocks, and who decided it."""

    num_blocks: int
    block_size: int
    block_bytes: int   # keys and values of all layers
    reason: str

    def __str__(self) -> str:
        return (f"KV pool: {self.num_blocks:,} blocks of {self.block_size} tokens, "
                f"{self.num_blocks * self.block_bytes / 1e6:,.1f} MB ({self.reason})")


def pool_size(model: LoadedModel, block_size: int, num_blocks: int | None, num_seqs: int, max_model_len: int
              ) -> PoolSize:
    """A given number of blocks, exactly; else what a share of memory holds, and no more than can be used.

    Args:
        num_seqs, max_model_len: at most so many sequences of so many tokens each are stored at a time.

    Raises:
        ValueError: num_blocks below 1, or a block_size that is no power of two.
    """
    BlockPool(1 if num_blocks is None else num_blocks, block_size)           # refuses what no pool can be
    config = model.config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_size * model.dtype.itemsize
    block_bytes, most_blocks = per_token * block_size, num_seqs * -(-max_model_len // block_size)
    if num_blocks is not None:
        return PoolSize(num_blocks, block_size, block_bytes, "as given")
    if model.device.type == "cuda":
        memory, share, what = torch.cuda.mem_get_info(model.device)[0], CUDA_SHARE, "free GPU memory"
    else:
        memory, share, what = psutil.virtual_memory().total, RAM_SHARE, "RAM"
    affordable = int(memory * share) // block_bytes
    if affordable < most_blocks:
        return PoolSize(max(1, affordable), block_size, block_bytes,
                        f"{share:.1%} of {memory / 1e9:,.1f} GB {what}")
    return PoolSize(most_blocks, block_size, block_bytes, f"all that {num_seqs} x {max_model_len:,} tokens can need")
