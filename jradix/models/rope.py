"""Rotary position embedding: frequencies in NumPy float64, cos and sin from positions inside jit.

Dimension i is rotated with dimension i + D/2 (the "rotate half" order of Hugging Face), not with its neighbour.
"""
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jradix.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Radians per position of each rotated pair.

    Returns:
      float32[D/2] computed in float64, and the factor on cos and sin (Peng et al. 2023 for yarn, else 1).
    """
    plain = rope.theta ** (-np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    match rope.type:
        case "default":
            frequencies, scale = plain, 1.0
        case "linear":
            frequencies, scale = plain / rope.factor, 1.0
        case "llama3":
            frequencies, scale = plain / llama3_divisors(rope), 1.0
        case "yarn":
            keep = _yarn_kept_share(rope)
            frequencies = plain * keep + plain / rope.factor * (1 - keep)
            scale = _yarn_scale(rope) if rope.attention_factor is None else rope.attention_factor
        case _:
            raise ValueError(f"rope type {rope.type!r}: RopeConfig.from_hf refuses this one")
    return frequencies.astype(np.float32), float(scale)


def llama3_divisors(rope: RopeConfig) -> np.ndarray:
    """What llama3 scaling divides each frequency by, float64[D/2]: 1 for short waves, `factor` for long ones, and in
    between linear in the number of waves that fit into the original length."""
    plain = rope.theta ** (-np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    waves = rope.original_max_len * plain / (2 * math.pi)
    smooth = np.clip((waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return 1 / ((1 - smooth) / rope.factor + smooth)


def rope_cos_sin(positions: jax.Array, rope: RopeConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for each token.

    Args:
      positions: int32[T].

    Returns:
      cos, sin: float32[T, D]; the second half of D repeats the first.
    """
    frequencies, scale = inverse_frequencies(rope)

    def compute(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        angles = positions.astype(jnp.float32)[:, None] * np.concatenate([frequencies, frequencies])
        return jnp.cos(angles) * scale, jnp.sin(angles) * scale

    def compute_once(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.cond(positions[0] >= 0, compute, lambda positions: (jnp.zeros(shape),) * 2, positions)

    # On CPUs as a branch, which is always taken: otherwise XLA computes them anew in the rotations of every layer (8% of
    # a batch of short chats). It removes an optimization barrier before it decides that (jax 0.10).
    shape = positions.shape[0], 2 * len(frequencies)
    return lax.platform_dependent(positions, cpu=compute_once, default=compute)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x float32[T, heads, D] by cos, sin float32[T, D]."""
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos[:, None] + jnp.concatenate([-second, first], axis=-1) * sin[:, None]


def _yarn_kept_share(rope: RopeConfig) -> np.ndarray:
    """Share of each frequency that stays unscaled: 1 below the band of dimensions, 0 above, linear inside."""
    def dimension(rotations: float) -> float:
        return rope.dim * math.log(rope.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001
    return 1 - np.clip((np.arange(rope.dim // 2, dtype=np.float64) - low) / width, 0, 1)


def _yarn_scale(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
