"""The TPU kernels at the sizes of real models: what the lowering and the ahead-of-time tests compile."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import pallas_tpu

NUM_ROWS, NUM_PAGES, POOL_PAGES = 64, 256, 512
CHUNK_TOKENS, NUM_GROUPS, NUM_MEMBERS = 512, 4, 16
KERNELS = ("decode", "extend", "shared_prefix")


class Model(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


MODELS = {"8b": Model(32, 8, 128), "smollm2": Model(9, 3, 64)}


def arguments(kernel: str, model: Model, dtype: object, page_size: int = 16) -> list[jax.ShapeDtypeStruct]:
    def spec(*shape: int, dtype: object = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    tokens = CHUNK_TOKENS if kernel == "extend" else NUM_ROWS
    rows = NUM_GROUPS if kernel == "shared_prefix" else NUM_ROWS
    last = dict(decode=[], extend=[spec(NUM_ROWS + 1)], shared_prefix=[spec(NUM_GROUPS, NUM_MEMBERS)])[kernel]
    pages = spec(POOL_PAGES, page_size, model.num_kv_heads * model.head_dim, dtype=dtype)
    return [spec(tokens, model.num_heads, model.head_dim, dtype=dtype), pages, pages, spec(rows, NUM_PAGES), spec(rows),
            *last]


def function(kernel: str, **settings: object) -> Callable:
    return functools.partial(getattr(pallas_tpu, kernel), sm_scale=0.1, **settings)


def targeting(device_kind: str, num_cores: int = 1) -> contextlib.AbstractContextManager:
    """Lowering without the device: jax >= 0.11 asks what it lowers for."""
    device = AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform="tpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
