"""The decoder's layers as Flax NNX modules. Activations are float32; only the weights' matmuls run in a narrower type.

Attention itself (the KV cache, masks, score scale) belongs to the caller, who passes it as a function.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jradix.models.config import ModelConfig
from jradix.models.rope import rotate
from jradix.ops.matmul import matmul

# (layer, q float32[T, Hq, D], k float32[T, Hkv, D], v float32[T, Hkv, D]) -> float32[T, Hq, D]
Attend: TypeAlias = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]

INIT_SCALE = 0.02


class Linear(nnx.Module):
    """x @ kernel^T + bias; kernel [out, in] in the weights' type, bias float32[out] or none."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(random_weights(rngs, (num_out, num_in), dtype))
        self.bias = nnx.Param(jnp.zeros(num_out, jnp.float32)) if bias else None

    def __call__(self, x: jax.Array, num_tokens: jax.Array | None = None) -> jax.Array:
        y = matmul(x, self.kernel[...], num_tokens)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.scale[...]


class Attention(nnx.Module):
    """Projections around the caller's attention; q, k and v come from one fused kernel [(Hq + 2 Hkv) D, H]."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear(config.hidden_size, config.qkv_width, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.attention_out_bias,
                          dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, layer: int, attend: Attend,
                 num_tokens: jax.Array | None) -> jax.Array:
        qkv = self.qkv(x, num_tokens).reshape(x.shape[0], -1, self.head_dim)
        q, k, v = jnp.split(qkv, (self.num_heads, self.num_heads + self.num_kv_heads), axis=1)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        y = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.out(y.reshape(x.shape[0], self.num_heads * self.head_dim), num_tokens)


class MLP(nnx.Module):
    """down(silu(gate) * up); gate and up come from one fused kernel [2 I, H] (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_up = Linear(hidden, 2 * intermediate, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.down = Linear(intermediate, hidden, bias=config.mlp_bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, num_tokens: jax.Array | None) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x, num_tokens), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up, num_tokens)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP around a float32 residual stream."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, layer: int, attend: Attend,
                 num_tokens: jax.Array | None) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), cos, sin, layer, attend, num_tokens)
        return x + self.mlp(self.mlp_norm(x), num_tokens)


def random_weights(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Normal with deviation `INIT_SCALE`."""
    return (jax.random.normal(rngs.params(), shape) * INIT_SCALE).astype(dtype)
