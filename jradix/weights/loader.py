"""Loads a checkpoint into a Decoder: which tensor goes where, and that every one of them is accounted for.

The sources (`hf`, `gguf`) give tensors in Hugging Face names; `orbax` restores arrays that are already ours.
Names and shapes are checked from the files' headers before the first byte goes to the device. Then one parameter at a
time is assembled on the host, in its final type, and put there.
"""
from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jradix.errors import CheckpointError
from jradix.gguf_header import read_gguf_header
from jradix.model_files import ModelFiles
from jradix.models.config import ModelConfig
from jradix.models.decoder import Decoder, abstract_parameters, build_decoder
from jradix.models.registry import find_architecture
from jradix.weights.gguf import GGUFSource, end_token_ids, read_hf_config
from jradix.weights.hf import SafetensorsSource, weight_files

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Buffers that older checkpoints store and that are computed from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attention.masked_bias", ".attention.bias")
MAX_LISTED = 10
FINGERPRINT_HEAD_BYTES = 1 << 20
FINGERPRINT_SAMPLES = 16
FINGERPRINT_SAMPLE_BYTES = 4096


class TensorSource(Protocol):
    """Tensors by Hugging Face name; `shapes` costs no reading of data."""
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray: ...


@dataclass(frozen=True)
class Parameter:
    """Where one parameter of the Decoder comes from.

    Attributes:
      path: its path in the Decoder.
      parts: (tensor name, shape in the checkpoint), one after the other along the output axis, the first.
    """
    path: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]


def load_model(files: ModelFiles, *, dtype: str | jnp.dtype, device: jax.Device,
               progress: Callable[[int, int], None] | None = None) -> Decoder:
    """Loads the weights onto one device.

    Args:
      files: from `model_files.resolve`.
      dtype: type of kernels, embedding and head; norms and biases are float32.
      device: where the weights go.
      progress: called as (bytes on the device, bytes in all) after each parameter; an Orbax checkpoint is restored in
        one call, so there it is called once.

    Raises:
      CheckpointError: missing, unexpected, cut or wrongly shaped tensors. Nothing is on the device then.
      UnsupportedModel: architecture, setting or tensor type.
    """
    dtype = jnp.dtype(dtype)
    if files.kind == "orbax":
        from jradix.weights.orbax import restore_orbax
        model = restore_orbax(files, dtype, SingleDeviceSharding(device))
        if progress is not None:
            total = _total_bytes(abstract_parameters(model.config, dtype))
            progress(total, total)
        return model
    config = load_config(files)
    source: TensorSource = GGUFSource(files.path) if files.kind == "gguf" else SafetensorsSource(files.path)
    parameters = parameter_sources(config)
    _check_names(source, parameters, config, files.name)
    targets = abstract_parameters(config, dtype)
    assert set(targets) == {parameter.path for parameter in parameters}
    total, done = _total_bytes(targets), 0
    arrays = {}
    for parameter in parameters:
        target = targets[parameter.path]
        arrays[parameter.path] = jax.device_put(_assemble(parameter, target, source), device).block_until_ready()
        done += target.size * target.dtype.itemsize
        if progress is not None:
            progress(done, total)
    return build_decoder(config, dtype, arrays)


def load_hf_config(files: ModelFiles) -> Any:
    """The model's config as a `transformers` config, family defaults filled in.

    Raises:
      UnsupportedModel: the architecture is not supported.
      CheckpointError: config.json is missing, damaged, or refused by transformers.
    """
    if files.kind == "gguf":
        return read_hf_config(files.path)
    raw = _read_json(files.path / "config.json")
    find_architecture(raw.get("architectures"), raw.get("model_type"))
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    try:
        return AutoConfig.from_pretrained(files.path, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        raise CheckpointError(f"{files.path / 'config.json'}: transformers refuses it: {error}") from error


def load_config(files: ModelFiles) -> ModelConfig:
    """Sizes and settings of the model; raises as `load_hf_config` and `ModelConfig.from_hf` do."""
    return ModelConfig.from_hf(load_hf_config(files))


def load_generation_config(files: ModelFiles) -> dict[str, Any]:
    """The checkpoint's sampling defaults and end tokens.

    Returns:
      generation_config.json of a folder, {} where it has none; for GGUF the "eos_token_id" list and "bos_token_id" of
      its metadata.
    """
    if files.kind == "gguf":
        header = read_gguf_header(files.path)
        found: dict[str, Any] = {"eos_token_id": end_token_ids(header)} if end_token_ids(header) else {}
        if "tokenizer.ggml.bos_token_id" in header.metadata:
            found["bos_token_id"] = header.metadata["tokenizer.ggml.bos_token_id"]
        return found
    path = files.path / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


def weights_fingerprint(files: ModelFiles) -> str:
    """Names these weights, so that a saved cache is only used with them. It reads at most 1 MB of each file.

    Per file in name order: its size, its first MiB (the header, and first values), and 16 samples of 4 KiB spread
    evenly over it; and config.json. Neither paths nor times enter, so a copied folder keeps its fingerprint.

    Returns:
      32 hexadecimal digits.
    """
    if files.kind == "gguf":
        weights, config = [files.path], b""
    elif files.kind == "orbax":
        from jradix.weights.orbax import WEIGHTS_FOLDER
        weights = sorted(file for file in (files.path / WEIGHTS_FOLDER).rglob("*") if file.is_file())
        config = (files.path / "config.json").read_bytes()
    else:
        weights, config = weight_files(files.path), (files.path / "config.json").read_bytes()
    digest = hashlib.sha256(config)
    for file in weights:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with open(file, "rb") as stream:
            digest.update(stream.read(FINGERPRINT_HEAD_BYTES))
            for sample in range(FINGERPRINT_SAMPLES):
                stream.seek(size * sample // FINGERPRINT_SAMPLES)
                digest.update(stream.read(FINGERPRINT_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def parameter_sources(config: ModelConfig) -> list[Parameter]:
    """Every parameter of the Decoder with the checkpoint tensors it is made of."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv, head = config.num_heads * config.head_dim, config.kv_width, config.head_dim
    vocabulary = (config.vocab_size, hidden)
    parameters = [Parameter("embed", ((EMBEDDING, vocabulary),)),
                  Parameter("norm.scale", (("model.norm.weight", (hidden,)),))]
    if not config.tie_embeddings:
        parameters.append(Parameter("head", ((HEAD, vocabulary),)))
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        norms = [("attention_norm", "input_layernorm", hidden), ("mlp_norm", "post_attention_layernorm", hidden)]
        if config.qk_norm:
            norms += [("attention.q_norm", "self_attn.q_norm", head), ("attention.k_norm", "self_attn.k_norm", head)]
        parameters += [Parameter(f"{ours}.{path}.scale", ((f"{theirs}.{name}.weight", (size,)),))
                       for path, name, size in norms]
        projections = (
            ("attention.qkv", config.attention_bias, hidden,
             (("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv))),
            ("attention.out", config.attention_out_bias, q, (("self_attn.o_proj", hidden),)),
            ("mlp.gate_up", config.mlp_bias, hidden, (("mlp.gate_proj", inner), ("mlp.up_proj", inner))),
            ("mlp.down", config.mlp_bias, inner, (("mlp.down_proj", hidden),)))
        for path, has_bias, num_in, parts in projections:
            parameters.append(Parameter(f"{ours}.{path}.kernel", tuple(
                (f"{theirs}.{name}.weight", (num_out, num_in)) for name, num_out in parts)))
            if has_bias:
                parameters.append(Parameter(f"{ours}.{path}.bias", tuple(
                    (f"{theirs}.{name}.bias", (num_out,)) for name, num_out in parts)))
    return parameters


def _check_names(source: TensorSource, parameters: list[Parameter], config: ModelConfig, model: str) -> None:
    """Every needed tensor is there in its shape, and nothing else is."""
    expected = {name: shape for parameter in parameters for name, shape in parameter.parts}
    found = source.shapes
    missing = sorted(set(expected) - set(found))
    unexpected = sorted(name for name in set(found) - set(expected)
                        if not name.endswith(IGNORED_SUFFIXES) and not (config.tie_embeddings and name == HEAD))
    if missing or unexpected:
        hint = "Is config.json the one of these weights?"
        if missing == [HEAD]:
            hint = "The config says tie_word_embeddings=false; if the model shares its embedding, set it to true"
        raise CheckpointError(f"{model}: the tensors do not match {config.architecture}: "
                              f"{_listed('missing', missing)}; {_listed('unexpected', unexpected)}. {hint}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise CheckpointError(f"{model}: tensor {name!r} has shape {tuple(found[name])}, the config needs {shape}. "
                                  f"Is config.json the one of these weights?")
    if config.tie_embeddings and HEAD in found:
        _warn_if_head_differs(source, found, model)


def _warn_if_head_differs(source: TensorSource, found: Mapping[str, tuple[int, ...]], model: str) -> None:
    """The rule for tie_word_embeddings=true with a head in the file: the embedding is used, whatever the head holds."""
    if found[HEAD] != found[EMBEDDING] or not np.array_equal(source.read(HEAD), source.read(EMBEDDING)):
        logger.warning("%s: tie_word_embeddings is true, yet %s differs from %s; the tied embedding is used. To use "
                       "the file's own head, set tie_word_embeddings to false in config.json", model, HEAD, EMBEDDING)


def _assemble(parameter: Parameter, target: jax.ShapeDtypeStruct, source: TensorSource) -> np.ndarray:
    """The parameter on the host in its final type and order; parts are converted while they are copied in."""
    out = np.empty(target.shape, target.dtype)
    start = 0
    for name, _ in parameter.parts:
        tensor = source.read(name)
        place = out[start:start + len(tensor)]
        with np.errstate(over="ignore"):
            place[...] = tensor
        start += len(tensor)
        if target.dtype == np.float16 and not np.isfinite(place).all():
            raise CheckpointError(f"tensor {name!r} has values beyond float16 (65,504); load it as bfloat16 or float32")
    assert start == len(out), (parameter, start)
    return out


def _total_bytes(targets: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    return sum(target.size * target.dtype.itemsize for target in targets.values())


def _listed(what: str, names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return f"none {what}"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{len(names)} {what}: {', '.join(names[:MAX_LISTED])}{more}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
