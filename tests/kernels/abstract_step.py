"""A whole engine step of an 8B-shaped model as shapes only: what the ahead-of-time tests compile for GPU and TPUs."""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from gpu_workloads import model_config
from jax.sharding import Sharding

from jradix.batch import LOGIT_BLOCK, StepLayout
from jradix.config import EngineConfig, StepShape
from jradix.models.decoder import Decoder, split_model
from jradix.ops.kv_cache import make_kv_cache
from jradix.runner.step import RowState, StepSettings, make_forward

ENGINE = EngineConfig(page_size=16, num_pages=8191, max_model_len=4096, max_num_seqs=64, grammar_bytes=0)


class AbstractStep(NamedTuple):
    """A forward pass with its arguments, as the model runner compiles it.

    Attributes:
      run: `run(leaves, kv, state, ints, logit_rows)`, to be jitted with kv and state donated.
      arguments: their shapes, on the device to compile for.
      pool_bytes: of the keys, or the values, of one layer.
      donated_bytes: of all pools and the row state.
      activation_bytes: of the widest activation, float32[T, 2 I].
      logit_bytes: of the logits, float32[S, V].
    """
    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    pool_bytes: int
    donated_bytes: int
    activation_bytes: int
    logit_bytes: int

    def trace(self) -> jax.stages.Traced:
        return jax.jit(self.run, donate_argnums=(1, 2)).trace(*self.arguments)


def abstract_step(implementation: str, platform: str, sharding: Sharding, *, num_layers: int = 2,
                  num_chunk_tokens: int = 0) -> AbstractStep:
    """Embedding, layers, logits of 128,256 tokens and the most probable one, for 64 rows; groups may share prefixes.

    Two layers stand for all 32: a layer brings pools and weights of its own, and the temporaries of one are free before
    the next begins, which a test with more layers checks.

    Args:
      implementation: of the attention.
      platform: "gpu" or "tpu".
      sharding: the device of all arguments.
      num_chunk_tokens: prompt tokens beside the rows; 0: a decode step.
    """
    config = replace(model_config("default"), num_layers=num_layers, layer_windows=(None,) * num_layers)
    model = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    _, leaves, merge = split_model(model)
    shape = StepShape(ENGINE.max_num_seqs, num_chunk_tokens)
    layout = StepLayout(shape, num_groups=1, max_pages=ENGINE.max_pages_per_seq, page_size=ENGINE.page_size,
                        num_logit_rows=-(-shape.num_tokens // LOGIT_BLOCK) * LOGIT_BLOCK, vocab_size=config.vocab_size)
    settings = StepSettings(
        head_dim=config.head_dim, vocab_size=config.vocab_size, num_valid_tokens=config.vocab_size,
        layer_windows=config.layer_windows, groups=config.kv_groups(), implementation=implementation, platform=platform)
    kv = jax.eval_shape(functools.partial(
        make_kv_cache, num_layers=num_layers, num_pages=ENGINE.num_pages, page_size=ENGINE.page_size,
        kv_width=config.kv_width, dtype=jnp.bfloat16, device=jax.devices("cpu")[0]))
    rows, vocab = ENGINE.max_num_seqs + 1, config.vocab_size
    state = RowState(*(jax.ShapeDtypeStruct(dims, dtype) for dims, dtype in (
        ((rows,), jnp.int32), ((rows, vocab), jnp.int32), ((rows, vocab), jnp.bool_), ((rows, vocab), jnp.float32),
        ((rows,), jnp.int32))))
    packed = layout.allocate()
    arguments = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
                             (leaves, kv, state, packed.ints, packed.logit_rows))
    return AbstractStep(make_forward(merge, layout, settings), arguments, num_bytes(kv.k[0]), num_bytes((kv, state)),
                        4 * shape.num_tokens * 2 * config.intermediate_size, 4 * shape.num_rows * vocab)


def num_bytes(arrays: Any) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))
