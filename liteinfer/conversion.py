"""A GGUF file -> a folder of safetensors in the cache, once.

Ground file. transformers can read GGUF too, but parses the file's metadata three
times and rebuilds its table of tensor names for every module of the network: 45
seconds or so for the bundled model on two cores, where this takes about 10.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from gguf import GGUFReader, dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from liteinfer.checkpoint import ARCHITECTURES, DEFAULT_ROPE_THETA, LoadError, one_line, quiet

FORMAT = 1   # part of the cached folder's name: raise it when what is written changes

# llama.cpp's names -> transformers' names; "blk.N.x" is "model.layers.N.x".
GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def cache_folder() -> Path:
    """`$LITEINFER_CACHE`, else `liteinfer` in the user's cache folder of this operating system."""
    if chosen := os.environ.get("LITEINFER_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "liteinfer"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted(stem: str, sha256: str, find: Callable[[], Path]) -> Path:
    """The cached folder for the GGUF file with this hash; converted first if it is not there.

    The folder appears by one rename, so it is whole whenever it exists: a killed
    conversion leaves only a `.part` folder, which the next one removes, and a
    second process waits for the lock and then finds the first one's result.

    Args:
        stem: a readable start of the folder's name.
        sha256: hash of the file's contents.
        find: called only when a conversion is needed; returns the checked file.
    """
    root = cache_folder()
    folder = root / f"{stem}-{sha256[:12]}-v{FORMAT}"
    if folder.is_dir():
        return folder
    gguf = find()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock"):
            if not folder.is_dir():
                _convert_to(gguf, folder)
    except (OSError, SafetensorError) as error:
        raise LoadError(f"cannot write the converted model to {root}: {error}; "
                        "LITEINFER_CACHE names another folder") from error
    return folder


def _convert_to(gguf: Path, folder: Path) -> None:
    """Convert into a temporary folder and rename it. The caller holds the lock."""
    part = folder.with_name(f"{folder.name}.part")
    if part.exists():
        shutil.rmtree(part)   # a killed conversion's
    part.mkdir()
    if sys.stderr.isatty():
        seconds = max(5, gguf.stat().st_size // 10_000_000)
        print(f"liteinfer: converting {gguf.name} to {folder}, once (about {seconds} s)", file=sys.stderr)
    try:
        try:
            convert_gguf(gguf, part)
        except (KeyError, TypeError, ZeroDivisionError, RuntimeError) as error:   # metadata of any kind
            raise LoadError(f"{gguf} cannot be converted: {one_line(error)}") from error
        for path in (*part.iterdir(), part):
            _fsync(path)
        part.rename(folder)
        _fsync(folder.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _fsync(path: Path) -> None:
    """Have the disk hold what was written. Windows cannot open a folder, and flushes renames itself."""
    if path.is_dir() and sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write `folder` (which exists) as a float32 checkpoint of the model in the file `gguf`.

    Writes model.safetensors, config.json, generation_config.json and, if the file
    holds a vocabulary, the tokenizer's files. Quantised weights are dequantised.

    Raises:
        LoadError: not a GGUF file, another architecture than Llama or Qwen2, a
            missing key, or something this conversion would lose (rope scaling).
    """
    try:
        reader = _Reader(gguf)
    except (ValueError, IndexError, OSError) as error:
        raise LoadError(f"{gguf} is not a GGUF file that can be read: {error}") from error
    metadata = _Metadata(gguf, reader)
    config = _config(metadata, {tensor.name for tensor in reader.tensors})
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        name, base = _transformers_name(gguf, tensor.name)
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if config["model_type"] == "llama" and base in heads:
            weight = unpermute(weight, heads[base])
        weights[name] = weight.contiguous()
    config["vocab_size"] = weights["model.embed_tokens.weight"].shape[0]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    if metadata.get("tokenizer.ggml.model") is not None:
        _convert_tokenizer(gguf, folder)


def _convert_tokenizer(gguf: Path, folder: Path) -> None:
    try:
        with quiet():
            PreTrainedTokenizerFast.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
    except Exception as error:
        raise LoadError(f"cannot convert the tokenizer of {gguf}: {one_line(error)}") from error


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Rows of a Llama q or k projection from llama.cpp's order back to transformers'.

    A head's D rows are D/2 pairs for the rotary embedding. llama.cpp stores pair
    i as rows 2i and 2i + 1, transformers as rows i and i + D/2.
    """
    pairs = weight.unflatten(0, (heads, -1, 2))                              # [heads, D / 2, 2, ...]
    return pairs.transpose(1, 2).flatten(0, 2)                               # [heads * D, ...]


class _Reader(GGUFReader):
    """Slicing a np.memmap is several times slower than slicing the plain array over it; metadata takes millions."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


class _Metadata:
    """The file's keys; those of the architecture without their prefix ("llama.block_count" -> "block_count")."""

    def __init__(self, gguf: Path, reader: GGUFReader) -> None:
        self.gguf, self.reader = gguf, reader
        self.architecture: str = self.need("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def of_model(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        if self.reader.get_field(key) is None:
            raise LoadError(f"{self.gguf} lacks the key {key}")
        return self.get(key)

    def need_of_model(self, key: str) -> Any:
        return self.need(f"{self.architecture}.{key}")


def _config(metadata: _Metadata, tensors: set[str]) -> dict[str, Any]:
    """What config.json says of the model, but for vocab_size."""
    if metadata.architecture not in ARCHITECTURES:
        raise LoadError(f"{metadata.gguf} holds a model of architecture {metadata.architecture!r}; "
                        f"supported: {', '.join(ARCHITECTURES)}")
    scaling = metadata.of_model("rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise LoadError(f"{metadata.gguf} scales its rotary embedding ({scaling!r}, or a rope_freqs tensor), which is "
                        "not supported for GGUF files; load the model's safetensors folder")
    hidden, heads = metadata.need_of_model("embedding_length"), metadata.need_of_model("attention.head_count")
    head_size = metadata.of_model("attention.key_length") or metadata.of_model("rope.dimension_count", hidden // heads)
    theta = _decimal(metadata.of_model("rope.freq_base", DEFAULT_ROPE_THETA))
    return {
        "architectures": [ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "hidden_size": hidden,
        "intermediate_size": metadata.need_of_model("feed_forward_length"),
        "num_hidden_layers": metadata.need_of_model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.of_model("attention.head_count_kv", heads),
        "head_dim": head_size,
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(metadata.need_of_model("attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": metadata.need_of_model("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
    }


def _decimal(value: float) -> float:
    """The short number that was meant: GGUF's float32 of 1e-05 is 9.999999747378752e-06 as a Python float."""
    return float(str(np.float32(value)))


def _transformers_name(gguf: Path, name: str) -> tuple[str, str]:
    """ "blk.3.attn_q.weight" -> ("model.layers.3.self_attn.q_proj.weight", "attn_q")."""
    match name.split("."):
        case ["blk", layer, base, suffix] if base in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[base]}.{suffix}", base
        case [base, suffix] if base in GLOBAL_NAMES:
            return f"{GLOBAL_NAMES[base]}.{suffix}", base
    raise LoadError(f"{gguf} holds the tensor {name}, which neither Llama nor Qwen2 has")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
