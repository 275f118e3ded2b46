"""Tiny random checkpoints, written without torch, and a cache-free attention to run a Decoder alone."""
from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jradix.models.config import ModelConfig
from jradix.models.layers import Attend

FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM"}
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=64, max_position_embeddings=512, rms_norm_eps=1e-5, hidden_act="silu", bos_token_id=1,
             eos_token_id=2)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
NUM_TOKENS = 48  # past the original length of the scaled ropes, and past every window

# Models whose logits by transformers are stored in data/tiny_references.npz.
REFERENCE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_untied_biased": ("llama", dict(tie_word_embeddings=False, attention_bias=True, mlp_bias=True)),
    "llama_head_dim": ("llama", dict(num_attention_heads=2, num_key_value_heads=1, head_dim=24)),
    "llama3": ("llama", dict(rope_scaling=LLAMA3)),
    "llama_linear": ("llama", dict(rope_scaling={"type": "linear", "factor": 4.0})),
    "mistral_window": ("mistral", dict(sliding_window=8, tie_word_embeddings=False)),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", dict(rope_scaling=YARN, max_position_embeddings=32)),
    "qwen2_windows": ("qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": ("qwen3", {}),
    "qwen3_biased": ("qwen3", dict(attention_bias=True, tie_word_embeddings=False)),
}


def reference_tokens() -> np.ndarray:
    """The prompt every model is run on, int64[48]."""
    return np.random.default_rng(7).integers(0, 64, NUM_TOKENS)


def toy_config(architecture: str = "llama", **overrides: Any) -> dict[str, Any]:
    """config.json of a toy model; an override of None removes the key (the family's default then holds)."""
    config = dict(SIZES, architectures=[FAMILIES[architecture]], model_type=architecture, tie_word_embeddings=True,
                  rope_theta=10000.0, torch_dtype="float32")
    if architecture == "mistral":
        config["sliding_window"] = None
    if architecture == "qwen3":
        config["head_dim"] = 16
    for name, value in overrides.items():
        config[name] = value
    return {name: value for name, value in config.items() if value is not None or name == "sliding_window"}


def toy_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor a checkpoint with this config.json holds (tied head left out)."""
    hidden, inner, family = config["hidden_size"], config["intermediate_size"], config["model_type"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    qkv_bias = family == "qwen2" or config.get("attention_bias", False)
    out_bias = family in ("llama", "qwen3") and config.get("attention_bias", False)
    mlp_bias = family == "llama" and config.get("mlp_bias", False)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        rows = {"self_attn.q_proj": (q, hidden, qkv_bias), "self_attn.k_proj": (kv, hidden, qkv_bias),
                "self_attn.v_proj": (kv, hidden, qkv_bias), "self_attn.o_proj": (hidden, q, out_bias),
                "mlp.gate_proj": (inner, hidden, mlp_bias), "mlp.up_proj": (inner, hidden, mlp_bias),
                "mlp.down_proj": (hidden, inner, mlp_bias)}
        for name, (num_out, num_in, bias) in rows.items():
            shapes[f"{at}.{name}.weight"] = (num_out, num_in)
            if bias:
                shapes[f"{at}.{name}.bias"] = (num_out,)
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        if family == "qwen3":
            shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def toy_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights large enough that attention and norms matter to the output."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in toy_shapes(config).items():
        values = random.standard_normal(shape)
        if len(shape) == 2:
            values = values * (1.5 / np.sqrt(shape[1]))
        else:
            values = values * 0.2 if name.endswith("bias") else 1 + 0.2 * values
        weights[name] = values.astype(np.float32)
    return weights


def make_checkpoint(folder: Path | str, architecture: str = "llama", *, seed: int = 0, num_shards: int = 1,
                    dtype: Any = np.float32, weights: Mapping[str, np.ndarray] | None = None,
                    **overrides: Any) -> dict[str, np.ndarray]:
    """Writes config.json and model.safetensors (or shards and their index) into `folder`.

    Args:
      folder: made if it is missing.
      architecture: a key of `FAMILIES`.
      seed: of the random weights.
      num_shards: more than 1 spreads the tensors over that many files.
      dtype: type of the stored tensors.
      weights: tensors to write instead of random ones.
      overrides: keys of config.json; None removes one.

    Returns:
      The tensors as stored, by Hugging Face name.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = toy_config(architecture, **overrides)
    chosen = toy_weights(config, seed) if weights is None else weights
    stored = {name: np.ascontiguousarray(value.astype(dtype)) for name, value in chosen.items()}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if num_shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return stored
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: stored[key] for key in list(stored)[shard::num_shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    total = sum(value.nbytes for value in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return stored


def causal_attend(config: ModelConfig) -> Attend:
    """Attention of one whole sequence over itself: no cache, token t at row t, windows respected."""
    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        num_tokens = q.shape[0]
        group = config.num_heads // config.num_kv_heads
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("thd,shd->hts", q, k, precision="highest") / np.sqrt(config.head_dim)
        distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None]
        window = config.layer_windows[layer]
        allowed = (distance >= 0) & (distance < (window or num_tokens))
        weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hts,shd->thd", weights, v, precision="highest")

    return attend
