"""A draft head on disk: a folder with its weights and its card, which says what it is and of which target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from liteinfer.loading import LoadedModel
from liteinfer.speculative.draft_head import num_layers

WEIGHTS, CARD = "draft_head.safetensors", "card.json"
SHIPPED = Path(__file__).parent / "heads"


def target_hash(model: LoadedModel) -> str:
    """Says whose hidden states a head was trained on: SHA-256 over the signs of the target's embedding and last layer.

    Signs are the same in float32, bfloat16 and float16, and a model that was trained further has other ones.
    They are read once for a model.
    """
    return model.once("target_hash", lambda: _hash_of_signs(model))


def _hash_of_signs(model: LoadedModel) -> str:
    last = f"model.layers.{model.config.num_layers - 1}."
    weights = model.weights_to_copy()
    names = ["model.embed_tokens.weight", *sorted(name for name in weights if name.startswith(last))]
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name} {tuple(weights[name].shape)}".encode())
        digest.update(weights[name].cpu().signbit().numpy().tobytes())
    return digest.hexdigest()


def is_head(name: str | Path) -> bool:
    """Whether this is the folder of a draft head."""
    return (Path(name).expanduser() / CARD).is_file()


def save_head(folder: Path, weights: Mapping[str, Tensor], card: Mapping[str, Any]) -> None:
    """Write the weights in bfloat16, and the card."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.int() if name == "tokens" else tensor.detach().bfloat16().cpu().contiguous()
               for name, tensor in weights.items()}, folder / WEIGHTS)
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def read_card(folder: Path) -> dict[str, Any]:
    """A head's card. Raises ValueError if there is none, or if it is no card."""
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"draft head {folder.name}: {CARD} cannot be read: {error}") from error
    if not isinstance(card, dict) or not isinstance(card.get("target_hash"), str):
        raise ValueError(f"draft head {folder.name}: {CARD} names no target_hash")
    return card


def load_head(folder: Path, model: LoadedModel) -> dict[str, Tensor]:
    """The weights of a head for this target, in its dtype and on its device.

    Raises:
        ValueError: not a head, one of another target, or weights that are not as the target asks.
    """
    card = read_card(folder)
    theirs, own = card["target_hash"], target_hash(model)
    if theirs != own:
        raise ValueError(f"draft head {folder.name} belongs to target {card.get('target')!r} ({theirs[:12]}), not to "
                         f"{model.name!r} ({own[:12]}): train one with python -m liteinfer.speculative.train")
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"draft head {folder.name}: {WEIGHTS} cannot be read: {error}") from error
    _check(folder.name, weights, model)
    return {name: tensor.long().to(model.device) if name == "tokens" else tensor.to(model.device, model.dtype)
            for name, tensor in weights.items()}


def shipped_head(model: LoadedModel) -> Path:
    """The folder of the head that comes with liteinfer for this target. Raises ValueError if there is none."""
    own = target_hash(model)
    for folder in sorted(SHIPPED.iterdir()) if SHIPPED.is_dir() else []:
        if is_head(folder) and read_card(folder)["target_hash"] == own:
            return folder
    raise ValueError(f"no draft head comes with liteinfer for {model.name!r}: train one with "
                     "python -m liteinfer.speculative.train, or name a draft model")


def expected_shapes(model: LoadedModel, layers: int, intermediate_size: int,
                    vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a head for this target, and its shape."""
    config = model.config
    hidden, inner = config.hidden_size, intermediate_size
    q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    layer = {"input_layernorm": (hidden,), "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
             "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q), "post_attention_layernorm": (hidden,),
             "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    return {"tokens": (vocab_size,), "embed_norm.weight": (hidden,), "fc.weight": (hidden, 2 * hidden),
            **{f"layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()},
            "norm.weight": (hidden,)}


def _check(name: str, weights: Mapping[str, Tensor], model: LoadedModel) -> None:
    """Raises ValueError for a tensor too many, too few, or of another shape; and for tokens the target lacks."""
    try:
        layers, inner = num_layers(weights), weights["layers.0.mlp.gate_proj.weight"].shape[0]
        wanted = expected_shapes(model, layers, inner, weights["tokens"].shape[0])
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(f"draft head {name}: {WEIGHTS} is not one: {error}") from error
    found = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    for key in sorted(found.keys() | wanted.keys()):
        if found.get(key) != wanted.get(key):
            raise ValueError(f"draft head {name}: tensor {key} is {found.get(key)}, {wanted.get(key)} is needed")
    tokens, vocab_size = weights["tokens"], model.config.vocab_size
    if not len(tokens):
        raise ValueError(f"draft head {name}: there is no token that it may guess")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise ValueError(f"draft head {name}: tokens reach {int(tokens.max())}, the target has {vocab_size}")
    if bad := next((key for key, tensor in weights.items() if not torch.isfinite(tensor.float()).all()), None):
        raise ValueError(f"draft head {name}: tensor {bad} has numbers that are not finite")
