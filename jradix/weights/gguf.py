"""GGUF files: their tensors in Hugging Face names, and their metadata as a `transformers` config.

Dequantised with the `gguf` package. The llama architecture stores the rows of q and k in pairs of neighbours for
llama.cpp's rotation; they are put back into halves here. Qwen2 and Qwen3 are stored as they are.
"""
from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jradix.errors import CheckpointError, UnsupportedModel
from jradix.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from jradix.models.config import RopeConfig
from jradix.models.rope import llama3_divisors

QUANT_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
PLAIN_TYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FREQUENCIES = "rope_freqs.weight"
LLAMA3_BAND = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192)
END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFSource:
    """Tensors of a file by Hugging Face name; names without one are kept as the file has them.

    Attributes:
      shapes: name -> shape of every tensor, `rope_freqs.weight` left out (the config stands for it).

    Raises:
      CheckpointError: the file is cut or damaged.
      UnsupportedModel: architecture or tensor type.
    """

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        architecture = _architecture(header, path)
        size = path.stat().st_size
        self._data = np.memmap(path, np.uint8, "r")
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in header.tensors:
            type_name, num_bytes = _type_and_bytes(tensor, path)
            if tensor.offset + num_bytes > size:
                raise CheckpointError(f"{path.name} has {size} bytes, tensor {tensor.name!r} ({type_name}) ends at "
                                      f"{tensor.offset + num_bytes}: incomplete download? Fetch the file again")
            self._tensors[_hf_name(tensor.name)] = tensor
        self._tensors.pop(ROPE_FREQUENCIES, None)
        self._path = path
        self._heads: dict[str, int] = {}
        if architecture == "llama":
            read = _Metadata(header, architecture, path)
            heads = read.integer("attention.head_count")
            self._heads = {"q_proj": heads, "k_proj": read.integer("attention.head_count_kv", heads)}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor: a view of the file for F32, F16 and BF16, else dequantised to float32."""
        values = _values(self._tensors[name], self._data, self._path)
        parts = name.split(".")
        return _unpermute(values, self._heads[parts[-2]]) if parts[-2] in self._heads else values


def read_hf_config(path: Path) -> Any:
    """The file's metadata as a `transformers` config of its architecture.

    Raises:
      UnsupportedModel: an architecture or setting that is not implemented.
      CheckpointError: a needed key is missing or contradicts another.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    header = read_gguf_header(path)
    architecture = _architecture(header, path)
    read = _Metadata(header, architecture, path)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{path.name} has no tensor 'token_embd.weight': it is no complete language model")
    heads, hidden = read.integer("attention.head_count"), read.integer("embedding_length")
    head_dim = read.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.integer(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{path.name}: {key}={read.integer(key)} but keys have {head_dim} dimensions; "
                                   f"supported: the same number")
    for key in ("attention.sliding_window", "expert_count"):
        if read.integer(key, 0):
            raise UnsupportedModel(f"{path.name}: {key}={read.integer(key)} is not supported; expected none")
    kind = CONFIG_MAPPING[architecture]
    settings: dict[str, Any] = dict(
        architectures=[MODEL_TYPES[architecture]], vocab_size=shapes["token_embd.weight"][0], hidden_size=hidden,
        intermediate_size=read.integer("feed_forward_length"), num_hidden_layers=read.integer("block_count"),
        num_attention_heads=heads, num_key_value_heads=read.integer("attention.head_count_kv", heads),
        head_dim=head_dim, rms_norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=read.integer("context_length"), tie_word_embeddings="output.weight" not in shapes,
        rope_parameters=_rope_parameters(header, read, head_dim, path), bos_token_id=header.metadata.get(
            "tokenizer.ggml.bos_token_id"), eos_token_id=end_token_ids(header) or None)
    if architecture == "llama":
        settings |= dict(attention_bias="blk.0.attn_q.bias" in shapes, mlp_bias="blk.0.ffn_gate.bias" in shapes)
    if architecture == "qwen3":
        settings["attention_bias"] = "blk.0.attn_q.bias" in shapes
    assert issubclass(kind, transformers.PretrainedConfig)
    return kind(**settings)


def end_token_ids(header: GGUFHeader) -> list[int]:
    """Tokens that end an output: end of text, of turn and of message, where the file names them."""
    ids = [header.metadata[key] for key in END_TOKENS if key in header.metadata]
    return list(dict.fromkeys(ids))


class _Metadata:
    """Keys of one architecture, by the name after the prefix."""

    def __init__(self, header: GGUFHeader, architecture: str, path: Path) -> None:
        self._values = header.metadata
        self._prefix = architecture
        self._path = path

    def get(self, key: str) -> Any:
        return self._values.get(f"{self._prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModel(f"{self._path.name}: {self._prefix}.{key} differs by layer; expected one value")
            value = value[0]
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self._path.name}: metadata {self._prefix}.{key}={value!r}: expected an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 of the file as the shortest decimal that means it (1e-05, not 9.999999747378752e-06)."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"{self._path.name}: metadata {self._prefix}.{key}={value!r}: expected a number")
        return float(str(np.float32(value)))


def _architecture(header: GGUFHeader, path: Path) -> str:
    architecture = header.metadata.get("general.architecture")
    if architecture not in MODEL_TYPES:
        raise UnsupportedModel(f"{path.name}: GGUF architecture {architecture!r} is not supported; supported: "
                               f"{', '.join(MODEL_TYPES)}")
    if header.metadata.get("split.count", 1) > 1:
        raise UnsupportedModel(f"{path.name} is one of {header.metadata['split.count']} parts of a split GGUF file; "
                               f"join them first with llama.cpp's `gguf-split --merge`")
    return architecture


def _rope_parameters(header: GGUFHeader, read: _Metadata, head_dim: int, path: Path) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": read.number("rope.freq_base", 10000.0)}
    frequencies = next((tensor for tensor in header.tensors if tensor.name == ROPE_FREQUENCIES), None)
    kind = read.get("rope.scaling.type")
    if kind in ("linear", "yarn"):
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
            neutral = 0.0 if key == "yarn_log_multiplier" else 1.0
            if read.number(f"rope.scaling.{key}", neutral) != neutral:
                raise UnsupportedModel(f"{path.name}: rope.scaling.{key}={read.get(f'rope.scaling.{key}')!r} is not "
                                       f"supported; expected {neutral}")
        parameters |= {"rope_type": kind, "factor": read.number("rope.scaling.factor")}
        if read.get("rope.scaling.original_context_length") is not None:
            parameters["original_max_position_embeddings"] = read.integer("rope.scaling.original_context_length")
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if kind == "yarn" and read.get(f"rope.scaling.{key}") is not None:
                parameters[name] = read.number(f"rope.scaling.{key}")
    elif kind not in (None, "none"):
        raise UnsupportedModel(f"{path.name}: rope.scaling.type={kind!r} is not supported; supported: linear, yarn, "
                               f"none")
    if frequencies is not None:
        if kind in ("linear", "yarn"):
            raise UnsupportedModel(f"{path.name}: {ROPE_FREQUENCIES} together with rope.scaling.type={kind!r} is not "
                                   f"supported; expected one of them")
        divisors = np.asarray(_values(frequencies, np.memmap(path, np.uint8, "r"), path), np.float64)
        parameters |= _llama3_parameters(divisors, parameters["rope_theta"], head_dim, path)
    return parameters


def _llama3_parameters(divisors: np.ndarray, theta: float, head_dim: int, path: Path) -> dict[str, Any]:
    """The llama3 rope settings whose divisors these are: the factor is the largest one, the band is Meta's."""
    if np.allclose(divisors, 1):
        return {}
    factor = float(str(np.float32(divisors.max())))
    rope = RopeConfig(type="llama3", theta=theta, dim=head_dim, factor=factor, **LLAMA3_BAND)
    if divisors.shape != (head_dim // 2,) or not np.allclose(llama3_divisors(rope), divisors, rtol=1e-4):
        raise UnsupportedModel(f"{path.name}: {ROPE_FREQUENCIES} is not the scaling of Llama 3 (bands 1 and 4 over "
                               f"8,192 tokens); load the model from its safetensors")
    return {"rope_type": "llama3", "factor": rope.factor, "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor, "original_max_position_embeddings": rope.original_max_len}


def _hf_name(name: str) -> str:
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


def _type_and_bytes(tensor: GGUFTensor, path: Path) -> tuple[str, int]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(kind): kind for kind in GGMLQuantizationType}
    kind = known.get(tensor.type_id)
    name = kind.name if kind is not None else f"number {tensor.type_id}"
    if name not in QUANT_TYPES and name not in PLAIN_TYPES:
        raise UnsupportedModel(f"{path.name}: tensor {tensor.name!r} has type {name}; supported: "
                               f"{', '.join((*PLAIN_TYPES, *QUANT_TYPES))}")
    block, num_bytes = GGML_QUANT_SIZES[kind]
    if not tensor.shape or tensor.shape[-1] % block:
        raise CheckpointError(f"{path.name}: tensor {tensor.name!r} of shape {tensor.shape} does not divide into "
                              f"blocks of {block} ({name}): the file is damaged")
    return name, math.prod(tensor.shape) // block * num_bytes


def _values(tensor: GGUFTensor, data: np.ndarray, path: Path) -> np.ndarray:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    name, num_bytes = _type_and_bytes(tensor, path)
    raw = np.asarray(data[tensor.offset:tensor.offset + num_bytes])
    if name in PLAIN_TYPES:
        return raw.view(PLAIN_TYPES[name]).reshape(tensor.shape)
    decode: Callable[..., np.ndarray] = dequantize
    return decode(raw.reshape(*tensor.shape[:-1], -1), GGMLQuantizationType[name])


def _unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (0, D/2, 1, D/2+1, ...) back to (0, 1, 2, ...); weights [out, in] or biases [out]."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
