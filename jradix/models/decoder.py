"""The decoder: embedding, unrolled layers, final norm and head; and how it is taken apart for jit."""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jradix.models.config import ModelConfig
from jradix.models.layers import Attend, DecoderLayer, RMSNorm, random_weights
from jradix.models.rope import rope_cos_sin
from jradix.ops.matmul import matmul


class Decoder(nnx.Module):
    """A decoder-only language model of the Llama family.

    The head is stored as the embedding is, [V, H], tied or not, and all kernels are [out, in] as well.

    Args:
      config: sizes and settings.
      dtype: type of the kernels, the embedding and the head; norms and biases are float32.
      rngs: random numbers of the initial weights.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs) -> None:
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(random_weights(rngs, shape, dtype))
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = None if config.tie_embeddings else nnx.Param(random_weights(rngs, shape, dtype))

    def __call__(self, tokens: jax.Array, positions: jax.Array, attend: Attend,
                 num_tokens: jax.Array | None = None) -> jax.Array:
        """Runs all layers over flat tokens.

        Args:
          tokens: int32[T], in [0, V); ids outside are clipped (padding).
          positions: int32[T].
          attend: `attend(layer, q, k, v)` with q float32[T, Hq, D], k and v float32[T, Hkv, D], q and k rotated;
            returns float32[T, Hq, D]. It owns the KV cache, the score scale 1/sqrt(D), masks and windows.
          num_tokens: int32[], tokens from this one on are padding, whose results are of no use; None: all count.

        Returns:
          Hidden states after the final norm, float32[T, H].
        """
        x = jnp.take(self.embed[...], tokens, axis=0, mode="clip").astype(jnp.float32)
        cos, sin = rope_cos_sin(positions, self.config.rope)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, index, attend, num_tokens)
        return self.norm(x)

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """Scores of the next token: hidden float32[K, H] -> float32[K, V]; rows from `num_rows` on are padding."""
        return matmul(hidden, (self.embed if self.head is None else self.head)[...], num_rows)


def split_model(model: Decoder) -> tuple[nnx.GraphDef, list[jax.Array], Callable[[list[jax.Array]], Decoder]]:
    """Takes a model apart into static structure and a flat list of weights.

    Passing the list and closing over the rest costs 0.1 ms a call for 300 weights; an `nnx.jit` of the model costs 10.

    Returns:
      The graphdef, the weights, and `merge(leaves) -> Decoder`, to be called inside a jitted function that takes the
      leaves as an argument.
    """
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)

    def merge(leaves: list[jax.Array]) -> Decoder:
        return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))

    return graphdef, leaves, merge


def abstract_parameters(config: ModelConfig, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Path ("layers.0.attention.qkv.kernel") -> shape and type of every parameter; allocates nothing."""
    _, state = nnx.split(_abstract(config, dtype))
    return {_dotted(path): jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            for path, variable in nnx.to_flat_state(state)}


def named_parameters(model: Decoder) -> dict[str, jax.Array]:
    """Path -> array of every parameter, in the words of `abstract_parameters`."""
    _, state = nnx.split(model)
    return {_dotted(path): variable[...] for path, variable in nnx.to_flat_state(state)}


def build_decoder(config: ModelConfig, dtype: jnp.dtype, arrays: Mapping[str, jax.Array]) -> Decoder:
    """A decoder that holds exactly these arrays.

    Args:
      arrays: one per path of `abstract_parameters`, with its shape and type, on the device it shall live on.
    """
    graphdef, state = nnx.split(_abstract(config, dtype))
    flat = list(nnx.to_flat_state(state))
    paths = {_dotted(path) for path, _ in flat}
    assert paths == set(arrays), sorted(paths ^ set(arrays))
    for path, variable in flat:
        array = arrays[_dotted(path)]
        assert (array.shape, array.dtype) == (variable.shape, variable.dtype), (path, array.shape, array.dtype)
    filled = [(path, variable.replace(arrays[_dotted(path)])) for path, variable in flat]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


@functools.lru_cache(maxsize=4)
def _abstract(config: ModelConfig, dtype: jnp.dtype) -> Decoder:
    """Shapes and types in place of arrays. Nobody changes it; making one takes about a second."""
    return nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))


def _dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in path)
