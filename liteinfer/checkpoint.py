"""A model folder in Hugging Face form: its config, its tensors' names and shapes, its tensors.

Ground file. Everything is checked before any tensor is read: what the config
asks for, that every file is there, and the name and shape of every tensor
against transformers' own model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}   # model_type -> class
DEFAULT_ROPE_THETA = 10000.0   # as in the code of the first Llama; where config.json gives none
INDEX = "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")   # safetensors' names of what can be cast


class LoadError(ValueError):
    """A model cannot be loaded. The message is one line that names what is wrong."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of the rotary embedding (rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a Llama or Qwen2 network that a forward needs."""

    architecture: str          # "llama" or "qwen2"
    vocab_size: int            # V
    hidden_size: int           # E
    intermediate_size: int     # I
    num_layers: int
    num_heads: int             # H
    num_kv_heads: int          # K
    head_size: int             # D
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def read_config(folder: Path) -> tuple[PretrainedConfig, ModelConfig]:
    """transformers' config of the model in `folder`, and ours. Raises LoadError for what cannot be run."""
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    try:
        check_raw_config(folder, raw)
        config = AutoConfig.from_pretrained(folder)
        return config, model_config(config, raw, read_json(generation) if generation.exists() else {})
    except LoadError:
        raise
    except Exception as error:   # values of any type may stand there
        raise LoadError(f"{folder / 'config.json'} cannot be used: {one_line(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise LoadError(f"{path.parent} has no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _rope(raw: Mapping[str, Any]) -> tuple[str, float, dict[str, Any]]:
    """The rotary embedding's type, theta and parameters, wherever a version of transformers has put them.

    Since 5.0 all is in `rope_parameters`; before, theta was a key of its own
    beside `rope_scaling`. Theta is 10000 where neither gives it.
    """
    parameters = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = parameters.get("rope_theta", raw.get("rope_theta"))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    return kind, float(DEFAULT_ROPE_THETA if theta is None else theta), parameters


def check_raw_config(folder: Path, raw: Mapping[str, Any]) -> None:
    """Refuse what neither forward here can run. On the JSON itself, before transformers interprets it."""
    named = (raw.get("architectures") or [None])[0]
    architecture = named or ARCHITECTURES.get(raw.get("model_type", ""), raw.get("model_type"))
    rope_type, _, rope_parameters = _rope(raw)
    rotated = rope_parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1))
    refusals = [
        (architecture not in ARCHITECTURES.values() or ARCHITECTURES.get(raw.get("model_type", "")) != architecture,
         f"architecture {architecture} is not supported, only {' and '.join(ARCHITECTURES.values())}"),
        (rope_type not in ("default", "llama3"),
         f"rope_type {rope_type!r} is not supported, only 'default' and 'llama3'"),
        (rotated != 1, f"partial_rotary_factor {rotated} is not supported, only 1"),
        (raw.get("hidden_act", "silu") != "silu",
         f"hidden_act {raw.get('hidden_act')!r} is not supported, only 'silu'"),
        (bool(raw.get("use_sliding_window")) or "sliding_attention" in (raw.get("layer_types") or ()),
         "sliding window attention (use_sliding_window) is not supported"),
        (bool(raw.get("quantization_config")),
         "quantised weights (quantization_config) are not supported"),
    ]
    for refused, reason in refusals:
        if refused:
            raise LoadError(f"{folder}: {reason}")


def model_config(config: PretrainedConfig, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Our config from transformers' and from what config.json (`raw`) and generation_config.json say.

    A token ends the output if either file calls it EOS (as in vLLM): config 2 and
    generation_config [0, 2] give (0, 2). Absent from both gives (): special tokens
    are read from `raw`, because transformers fills in those of the first Llama.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise LoadError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    eos = sorted({*_ids(raw.get("eos_token_id")), *_ids(generation.get("eos_token_id"))})
    for token in eos:
        if not 0 <= token < config.vocab_size:
            raise LoadError(f"eos_token_id {token} is not below vocab_size {config.vocab_size}")
    rope_type, theta, parameters = _rope(config.to_dict())
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    for name, value in (("max_position_embeddings", config.max_position_embeddings), ("rope_theta", theta),
                        ("num_hidden_layers", config.num_hidden_layers), ("head_dim", head_size)):
        if not value > 0:
            raise LoadError(f"{name} must be above 0, got {value}")
    return ModelConfig(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=_rope_scaling(parameters) if rope_type == "llama3" else None,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        eos_token_ids=tuple(eos),
        bos_token_id=raw.get("bos_token_id"),
    )


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _rope_scaling(parameters: Mapping[str, Any]) -> RopeScaling:
    try:
        scaling = RopeScaling(
            float(parameters["factor"]), float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"]),
            int(parameters["original_max_position_embeddings"]))
        if scaling.factor <= 0 or scaling.low_freq_factor >= scaling.high_freq_factor:
            raise ValueError("factor is not above 0, or low_freq_factor not below high_freq_factor")
        return scaling
    except (KeyError, TypeError, ValueError) as error:
        needed = ", ".join(field.name for field in fields(RopeScaling))
        raise LoadError(f"rope_type 'llama3' needs the numbers {needed}; the config has {dict(parameters)}") from error


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """transformers' model, frozen, without memory behind its tensors."""
    from transformers import AutoModelForCausalLM  # here, because it takes seconds

    with torch.device("meta"), quiet():
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").requires_grad_(False)


def shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model; a tied lm_head.weight included."""
    return {name: tuple(tensor.shape) for name, tensor in skeleton(config).state_dict().items()}


def check_tensors(folder: Path, config: PretrainedConfig) -> dict[str, Path]:
    """Compare the checkpoint's headers with the model's tensors. Returns which file holds each tensor to read.

    Raises:
        LoadError: a tensor or a file is missing, unknown, misshapen or not of floats; no tensor has been read.
    """
    wanted = shapes(config)
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in _weight_files(folder):
        for name, dtype, shape in _header(path):
            if dtype not in FLOAT_DTYPES:
                raise LoadError(f"{path}: tensor {name} is {dtype}, only {', '.join(FLOAT_DTYPES)} are supported")
            found[name] = path, shape
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    _refuse(folder, "misses the tensor", [f"{name} of shape {list(shape)}" for name, shape in wanted.items()
                                          if name not in found and name not in tied])
    # Old checkpoints store the rotary embedding's inverse frequencies, which are computed from the config.
    _refuse(folder, "holds the unknown tensor", [f"{name} of shape {list(shape)}" for name, (_, shape) in found.items()
                                                 if name not in wanted and not name.endswith("rotary_emb.inv_freq")])
    _refuse(folder, "holds a misshapen tensor", [
        f"{name}: shape {list(found[name][1])}, but the config asks for {list(shape)}"
        for name, shape in wanted.items() if name in found and found[name][1] != shape])
    if tied & found.keys():
        _check_tied(folder, {name: found[name][0] for name in ("lm_head.weight", "model.embed_tokens.weight")})
    return {name: found[name][0] for name in wanted if name not in tied}


def _refuse(folder: Path, problem: str, tensors: list[str]) -> None:
    if tensors:
        more = f" (and {len(tensors) - 1} more)" if len(tensors) > 1 else ""
        raise LoadError(f"{folder} {problem} {tensors[0]}{more}")


def _check_tied(folder: Path, files: Mapping[str, Path]) -> None:
    """A tied head stored all the same must be the embedding again, or one of the two would be lost."""
    head, embedding = read_tensors(files, None, torch.device("cpu")).values()
    if not torch.equal(head, embedding):
        raise LoadError(f"{folder}: {' differs from '.join(files)} though tie_word_embeddings is true")


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those its index lists, or model.safetensors."""
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
            raise LoadError(f"{folder / INDEX} has no weight_map that names a file for each tensor")
        shards = sorted(set(listed.values()))
        for shard in shards:
            if not (folder / shard).is_file():
                raise LoadError(f"{folder} misses the shard {shard}, one of {len(shards)} that {INDEX} lists")
        return [folder / shard for shard in shards]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    raise LoadError(f"{folder} has neither model.safetensors nor {INDEX}"
                    + (f" (only {', '.join(others)})" if others else ""))


def _header(path: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of every tensor in a safetensors file; no tensor is read."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                yield name, part.get_dtype(), tuple(part.get_shape())
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} is not a readable safetensors file: {error}") from error


def read_tensors(files: Mapping[str, Path], dtype: torch.dtype | None, device: torch.device) -> dict[str, Tensor]:
    """Read tensors, cast, into memory of their own (what safe_open returns is the file, mapped)."""
    weights = {}
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for name in (name for name, place in files.items() if place == path):
                weights[name] = file.get_tensor(name).to(device=device, dtype=dtype, copy=True)
    return weights


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' warnings off the screen, and set its verbosity back afterwards."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
