"""Merging of attention over disjoint sets of keys, by the log-sum-exp of their scores."""
from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


def merge(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Attention over the union of disjoint sets of keys, exact to float32 rounding.

    Args:
      outs: float32[..., D] each, normalised over its own keys.
      lses: float32[...] each, natural logarithm of the sum of exp(score); -inf where a query sees none of them.

    Returns:
      float32[..., D] and float32[...]; 0 and -inf for a query that sees no key at all.
    """
    top = lses[0]
    for lse in lses[1:]:
        top = jnp.maximum(top, lse)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = [jnp.exp(lse - top) for lse in lses]
    total = sum(weights[1:], weights[0])
    safe = jnp.where(total == 0, 1, total)
    out = sum((out * (weight / safe)[..., None] for out, weight in zip(outs, weights)), jnp.float32(0))
    return out, jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
