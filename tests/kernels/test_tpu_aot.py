"""The TPU kernels and a whole step compile ahead of time for chips that are not there, where libtpu is installed."""
from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels import pallas_tpu
from pallas_kernels.blocks import DecodeBlocks, ExtendBlocks
from tests.kernels.abstract_step import abstract_step
from tests.kernels.tpu_shapes import KERNELS, MODELS, arguments, function, targeting

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None,
                                reason="no TPU compiler: libtpu of the version in jax's extra `tpu` is not there; "
                                       "make test-kernels installs it")
TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v6e:2x2")


def param(*values: object, is_slow: bool) -> object:
    return pytest.param(*values, marks=pytest.mark.slow if is_slow else ())


@pytest.fixture(scope="module", autouse=True)
def no_metadata_server() -> Iterator[None]:
    """libtpu asks the cloud's metadata server for the machine it runs on, and waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TPU_SKIP_MDS_QUERY", "1")
        yield


def chip(topology: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(topologies.get_topology_desc(topology, "tpu").devices[0])


def compile_traced(sharding: SingleDeviceSharding, trace: Callable[[], jax.stages.Traced]) -> jax.stages.Compiled:
    device, = sharding.device_set
    with targeting(device.device_kind, device.num_cores):
        return trace().lower(lowering_platforms=("tpu",)).compile()


def compile_for(topology: str, run: Callable[..., object], *specs: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
    sharding = chip(topology)
    specs = [jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding) for spec in specs]
    return compile_traced(sharding, lambda: jax.jit(run).trace(*specs))


@pytest.mark.parametrize("topology, kernel, model, dtype", [
    param(*case, is_slow=case[0] == "v4:2x2x1" or case[2:] != ("8b", jnp.bfloat16))
    for case in itertools.product(TOPOLOGIES, KERNELS, MODELS, (jnp.bfloat16, jnp.float32))])
def test_kernel_of_a_model_compiles_with_its_rule(topology: str, kernel: str, model: str, dtype: object) -> None:
    """No copy of the pool: temporaries stay below one of its halves; decode and shared_prefix need next to none."""
    specs = arguments(kernel, MODELS[model], dtype)
    temporaries = compile_for(topology, function(kernel), *specs).memory_analysis().temp_size_in_bytes
    pool = specs[1].size * specs[1].dtype.itemsize
    assert temporaries < (pool if kernel == "extend" else 1 << 20)


@pytest.mark.parametrize("topology, num_chunk_tokens", [
    *(param(topology, 0, is_slow=topology == "v4:2x2x1") for topology in TOPOLOGIES),
    *(param(topology, 512, is_slow=topology != "v5e:2x2") for topology in TOPOLOGIES)])
def test_step_of_an_8b_model_writes_its_pools_in_place(topology: str, num_chunk_tokens: int) -> None:
    """64 decode rows, alone or beside 512 prompt tokens: all that is donated is aliased, and nothing copies a pool.

    Temporaries have room for two of the widest activations, and for the logits laid out anew in columns of 64, which
    tiles of 128 pad to twice their size: the argmax goes by blocks.
    """
    sharding = chip(topology)
    step = abstract_step("pallas_tpu", "tpu", sharding, num_chunk_tokens=num_chunk_tokens)
    compiled = compile_traced(sharding, step.trace)
    memory = compiled.memory_analysis()
    assert "paged_walk" in compiled.as_text()
    assert memory.alias_size_in_bytes >= step.donated_bytes        # tiles pad them
    assert memory.temp_size_in_bytes <= 2 * (step.activation_bytes + step.logit_bytes) < step.pool_bytes


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [8, 32, 128])
@pytest.mark.parametrize("kernel", ["decode", "extend"])
def test_page_sizes_with_window_and_cap_compile(kernel: str, page_size: int) -> None:
    specs = arguments(kernel, MODELS["8b"], jnp.bfloat16, page_size=page_size)
    compile_for("v5e:2x2", function(kernel, sliding_window=1000, soft_cap=30.0), *specs)


@pytest.mark.parametrize("kernel, blocks", [
    ("decode", DecodeBlocks(4096)), pytest.param("extend", ExtendBlocks(256, 512), marks=pytest.mark.slow)])
def test_blocks_over_the_budget_run_out_of_vmem(monkeypatch: pytest.MonkeyPatch, kernel: str,
                                                blocks: DecodeBlocks | ExtendBlocks) -> None:
    """The refusal that the budget would have given is the compiler's own, so the budget is not empty caution."""
    monkeypatch.setattr(pallas_tpu, "choose", lambda kernel, layouts: next(iter(layouts)))
    specs = arguments(kernel, MODELS["8b"], jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_for("v5e:2x2", function(kernel, blocks=blocks), *specs)


@pytest.mark.slow
def test_page_table_over_the_budget_runs_out_of_smem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_tpu, "check_smem", lambda *sizes: None)
    specs = arguments("decode", MODELS["8b"], jnp.bfloat16)
    specs[3] = jax.ShapeDtypeStruct((specs[3].shape[0], 4096), jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="smem"):
        compile_for("v5e:2x2", function("decode"), *specs)
