"""A float64 NumPy forward pass, written from the papers: what the Decoder is measured against.

It shares no code with jradix; it takes Hugging Face tensors and reads only plain sizes from the config.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def forward(weights: Mapping[str, np.ndarray], config: Any, tokens: Sequence[int],
            positions: Sequence[int] | None = None) -> np.ndarray:
    """Logits of every position of one sequence.

    Args:
      weights: tensors by Hugging Face name, any float type.
      config: a `ModelConfig`.
      tokens: ids.
      positions: of the tokens; None: 0, 1, 2, ...

    Returns:
      float64[T, V].
    """
    def w(name: str) -> np.ndarray:
        return np.asarray(weights[name]).astype(np.float64)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        y = np.einsum("ti,oi->to", x, w(name + ".weight"))
        return y + w(name + ".bias") if name + ".bias" in weights else y

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + config.rms_norm_eps) * w(name + ".weight")

    places = np.arange(len(tokens)) if positions is None else np.asarray(positions)
    turn = rotation(config.rope, places)
    per_group = config.num_heads // config.num_kv_heads
    x = w("model.embed_tokens.weight")[np.asarray(tokens)]
    for i in range(config.num_layers):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm")
        q, k, v = (linear(h, f"{at}self_attn.{n}_proj").reshape(len(tokens), -1, config.head_dim) for n in "qkv")
        if config.qk_norm:
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        q, k = turn(q), turn(k)
        heads = []
        for head in range(config.num_heads):
            scores = q[:, head] @ k[:, head // per_group].T / math.sqrt(config.head_dim)
            gap = places[:, None] - places[None]
            window = config.layer_windows[i]
            scores = np.where((gap >= 0) & (gap < (window if window else np.inf)), scores, -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(scores / scores.sum(-1, keepdims=True) @ v[:, head // per_group])
        x = x + linear(np.concatenate(heads, -1), at + "self_attn.o_proj")
        h = norm(x, at + "post_attention_layernorm")
        gate = linear(h, at + "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, at + "mlp.up_proj"), at + "mlp.down_proj")
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return norm(x, "model.norm") @ w(head).T


def rotation(rope: Any, places: np.ndarray) -> Any:
    """The rotation of [T, heads, D] as complex multiplication of the pairs (i, i + D/2)."""
    half = rope.dim // 2
    frequencies, scale = np.empty(half), 1.0
    for i in range(half):
        plain = rope.theta ** (-2 * i / rope.dim)
        frequencies[i] = plain
        if rope.type == "linear":
            frequencies[i] = plain / rope.factor
        elif rope.type == "llama3":
            wave = 2 * math.pi / plain
            if wave > rope.original_max_len / rope.low_freq_factor:
                frequencies[i] = plain / rope.factor
            elif wave >= rope.original_max_len / rope.high_freq_factor:
                band = rope.high_freq_factor - rope.low_freq_factor
                smooth = (rope.original_max_len / wave - rope.low_freq_factor) / band
                frequencies[i] = plain * ((1 - smooth) / rope.factor + smooth)
        elif rope.type == "yarn":
            def dimension(turns: float) -> float:
                return rope.dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

            low = max(math.floor(dimension(rope.beta_fast)), 0)
            high = min(math.ceil(dimension(rope.beta_slow)), rope.dim - 1)
            ramp = min(max((i - low) / max(high - low, 0.001), 0), 1)
            frequencies[i] = plain / rope.factor * ramp + plain * (1 - ramp)
    if rope.type == "yarn":
        scale = rope.attention_factor or (0.1 * math.log(rope.factor) + 1)
    spin = np.exp(1j * places[:, None] * frequencies) * scale

    def turn(x: np.ndarray) -> np.ndarray:
        pairs = (x[..., :half] + 1j * x[..., half:]) * spin[:, None]
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    return turn
