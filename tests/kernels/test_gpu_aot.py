"""The Hopper kernels and a whole step compiled ahead of time for an H200: machine code, pools in place, temporaries."""
from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.experimental import topologies
from jax.sharding import Sharding, SingleDeviceSharding

from pallas_kernels import mosaic_gpu
from tests.kernels.abstract_step import abstract_step

TARGET = Path(__file__).with_name("h200.txtpb")      # what XLA would ask the device itself, as a GpuTargetConfigProto
HAS_COMPILER = importlib.util.find_spec("jax_plugins") is not None and \
    importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no CUDA compiler: jax-cuda13-plugin and jax-cuda13-pjrt of "
                                                         "jax's version are not there; make test-kernels installs them")
# Read when the first backend starts, whichever test that is: there is no driver here to check.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

LLAMA_8B, SMOLLM2, WIDE = (32, 8, 128), (9, 3, 64), (16, 2, 256)      # query heads, kv heads, head_dim


@functools.cache
def h200() -> Sharding:
    topology = topologies.get_topology_desc(platform="cuda", topology_name="h200", topology="1x1x1",
                                            target_config=TARGET.read_text(encoding="utf-8"))
    return SingleDeviceSharding(topology.devices[0])


def shape(dims: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=h200())


def pool(num_pages: int, page_size: int, model: tuple[int, int, int], dtype: Any) -> jax.ShapeDtypeStruct:
    return shape((num_pages, page_size, model[1] * model[2]), dtype)


def compile_kernel(kernel: str, model: tuple[int, int, int], dtype: Any, page_size: int, **settings: Any) -> Any:
    """16 rows of up to 2,048 tokens; 512 new tokens of `extend`; two groups of 8 rows of `shared_prefix`."""
    heads, _, head_dim = model
    pages, num_columns = pool(256, page_size, model, dtype), 2048 // page_size
    q = shape((512 if kernel == "extend" else 16, heads, head_dim), dtype)
    rest = dict(decode=[(16, num_columns), (16,)], extend=[(16, num_columns), (16,), (17,)],
                shared_prefix=[(2, num_columns), (2,), (2, 8)])[kernel]
    run = functools.partial(getattr(mosaic_gpu, kernel), sm_scale=0.125, **settings)
    return jax.jit(run).trace(q, pages, pages, *(shape(dims) for dims in rest)).lower().compile()


@pytest.mark.parametrize("kernel, model, dtype, page_size", [
    ("decode", SMOLLM2, jnp.float16, 16),
    ("extend", LLAMA_8B, jnp.bfloat16, 16),
    ("shared_prefix", LLAMA_8B, jnp.bfloat16, 64),
])
def test_kernel_for_h200_compiles_without_spills(kernel: str, model: tuple[int, int, int], dtype: Any, page_size: int,
                                                 monkeypatch: pytest.MonkeyPatch,
                                                 capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    assert "mosaic_gpu" in compile_kernel(kernel, model, dtype, page_size).as_text()
    said = "".join(capfd.readouterr())
    assert "for 'sm_90a'" in said and "0 bytes spill stores" in said


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["decode", "extend", "shared_prefix"])
@pytest.mark.parametrize("model", [LLAMA_8B, SMOLLM2, WIDE, (4, 4, 96), (8, 8, 32), (12, 2, 192)])
@pytest.mark.parametrize("page_size, dtype", [(8, jnp.float16), (24, jnp.bfloat16), (128, jnp.bfloat16)])
def test_kernel_of_all_pages_compiles(kernel: str, model: tuple[int, int, int], page_size: int, dtype: Any) -> None:
    settings = dict(soft_cap=30.0) | (dict() if kernel == "shared_prefix" else dict(sliding_window=100))
    assert "mosaic_gpu" in compile_kernel(kernel, model, dtype, page_size, **settings).as_text()


@pytest.mark.parametrize("model", [LLAMA_8B, SMOLLM2])
def test_decode_step_with_donated_pools_writes_in_place(model: tuple[int, int, int]) -> None:
    """64 rows on a pool of 65,536 tokens; temporaries hold padded queries and partial results, nothing of its size."""
    heads, kv_heads, head_dim = model
    rows, pages = 64, pool(4096, 16, model, jnp.bfloat16)

    def step(k_pages: Array, v_pages: Array, q: Array, k: Array, v: Array, slots: Array, table: Array,
             kv_lens: Array) -> tuple[Array, Array, Array]:
        k_pages, v_pages = mosaic_gpu.write_kv(k_pages, v_pages, k, v, slots)
        out, _ = mosaic_gpu.decode(q, k_pages, v_pages, table, kv_lens, sm_scale=head_dim**-0.5)
        return k_pages, v_pages, out

    new = shape((rows, kv_heads * head_dim), jnp.bfloat16)
    compiled = jax.jit(step, donate_argnums=(0, 1)).trace(
        pages, pages, shape((rows, heads, head_dim), jnp.bfloat16), new, new, shape((rows,)), shape((rows, 128)),
        shape((rows,))).lower().compile()
    memory = compiled.memory_analysis()
    pool_bytes = 2 * pages.size * pages.dtype.itemsize
    group_rows = 8                                             # a kv head's queries, padded
    partial_bytes = rows * kv_heads * group_rows * head_dim * 4
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes <= 4 * partial_bytes + (64 << 10)


@pytest.mark.parametrize("num_chunk_tokens", [0, pytest.param(512, marks=pytest.mark.slow)])
def test_step_of_an_8b_model_writes_its_pools_in_place(num_chunk_tokens: int) -> None:
    """64 decode rows, alone or beside 512 prompt tokens: all that is donated is aliased, and nothing copies a pool.

    Temporaries hold the activations of a layer, in room for two of the widest; those of decode rows take 7 MB.
    """
    step = abstract_step("mosaic_gpu", "gpu", h200(), num_chunk_tokens=num_chunk_tokens)
    compiled = step.trace().lower().compile()
    memory = compiled.memory_analysis()
    assert "mosaic_gpu" in compiled.as_text()
    assert memory.alias_size_in_bytes == step.donated_bytes
    assert memory.temp_size_in_bytes <= 2 * step.activation_bytes < step.pool_bytes


@pytest.mark.slow
def test_step_of_more_layers_takes_no_more_temporaries() -> None:
    """Why two layers may stand for all of them: measured 1.1% more, nothing of it from the fourth layer on."""
    few, many = (abstract_step("mosaic_gpu", "gpu", h200(), num_layers=num).trace().lower().compile().memory_analysis()
                 for num in (2, 6))
    assert many.temp_size_in_bytes <= few.temp_size_in_bytes * 1.02


def test_copied_pools_are_seen_in_the_memory_analysis() -> None:
    """A control of the tests above: without donation the pools are copied, and nothing is aliased."""
    pages = pool(512, 16, SMOLLM2, jnp.bfloat16)
    new = shape((16, pages.shape[2]), jnp.bfloat16)
    compiled = jax.jit(mosaic_gpu.write_kv).trace(pages, pages, new, new, shape((16,))).lower().compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 0
    assert memory.output_size_in_bytes >= 2 * pages.size * pages.dtype.itemsize


def test_pool_that_is_read_after_its_write_shows_in_the_temporaries() -> None:
    """The other control: donated as it is, the old keys have to be kept somewhere."""
    pages = pool(512, 16, SMOLLM2, jnp.bfloat16)
    new = shape((16, pages.shape[2]), jnp.bfloat16)

    def step(k_pages: Array, v_pages: Array, k: Array, v: Array, slots: Array) -> tuple[Array, Array, Array]:
        written, v_pages = mosaic_gpu.write_kv(k_pages, v_pages, k, v, slots)
        return written, v_pages, jnp.abs(written - k_pages).max()

    memory = jax.jit(step, donate_argnums=(0, 1)).trace(pages, pages, new, new, shape((16,))).lower().compile(
        ).memory_analysis()
    assert memory.temp_size_in_bytes >= pages.size * pages.dtype.itemsize
