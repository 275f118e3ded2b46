"""The TPU kernels compile ahead of time for chips that are not there, where libtpu is installed (`jax[tpu]` has it)."""
from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels import pallas_tpu
from pallas_kernels.blocks import DecodeBlocks, ExtendBlocks
from tests.kernels.tpu_shapes import KERNELS, MODELS, arguments, function, targeting

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(importlib.util.find_spec("libtpu") is None,
                                 reason="libtpu, the compiler for TPUs, is not installed: pip install jax[tpu]")]
TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v6e:2x2")


@pytest.fixture(scope="module", autouse=True)
def no_metadata_server() -> Iterator[None]:
    """libtpu asks the cloud's metadata server for the machine it runs on, and waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TPU_SKIP_MDS_QUERY", "1")
        yield


def compile_for(topology: str, run: object, *specs: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
    device = topologies.get_topology_desc(topology, "tpu").devices[0]
    sharding = SingleDeviceSharding(device)
    specs = [jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding) for spec in specs]
    with targeting(device.device_kind, device.num_cores):
        return jax.jit(run).trace(*specs).lower(lowering_platforms=("tpu",)).compile()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_kernel_of_a_model_compiles_with_its_rule(topology: str, kernel: str, model: str, dtype: object) -> None:
    """No copy of the pool: temporaries stay below one of its halves; decode and shared_prefix need next to none."""
    specs = arguments(kernel, MODELS[model], dtype)
    temporaries = compile_for(topology, function(kernel), *specs).memory_analysis().temp_size_in_bytes
    pool = specs[1].size * specs[1].dtype.itemsize
    assert temporaries < (pool if kernel == "extend" else 1 << 20)


@pytest.mark.parametrize("page_size", [8, 32, 128])
@pytest.mark.parametrize("kernel", ["decode", "extend"])
def test_page_sizes_with_window_and_cap_compile(kernel: str, page_size: int) -> None:
    specs = arguments(kernel, MODELS["8b"], jnp.bfloat16, page_size=page_size)
    compile_for("v5e:2x2", function(kernel, sliding_window=1000, soft_cap=30.0), *specs)


@pytest.mark.parametrize("kernel, blocks", [("decode", DecodeBlocks(4096)), ("extend", ExtendBlocks(256, 512))])
def test_blocks_over_the_budget_run_out_of_vmem(monkeypatch: pytest.MonkeyPatch, kernel: str,
                                                blocks: DecodeBlocks | ExtendBlocks) -> None:
    """The refusal that the budget would have given is the compiler's own, so the budget is not empty caution."""
    monkeypatch.setattr(pallas_tpu, "choose", lambda kernel, layouts: next(iter(layouts)))
    specs = arguments(kernel, MODELS["8b"], jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_for("v5e:2x2", function(kernel, blocks=blocks), *specs)


def test_page_table_over_the_budget_runs_out_of_smem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_tpu, "check_smem", lambda *sizes: None)
    specs = arguments("decode", MODELS["8b"], jnp.bfloat16)
    specs[3] = jax.ShapeDtypeStruct((specs[3].shape[0], 4096), jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="smem"):
        compile_for("v5e:2x2", function("decode"), *specs)
