"""The TPU kernels lower to Mosaic on a machine without a TPU, and what they do not serve is refused before that."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import pallas_tpu_budget
from pallas_kernels.blocks import DecodeBlocks
from pallas_kernels.errors import UnsupportedKernel
from tests.kernels.tpu_shapes import KERNELS, MODELS, arguments, function, targeting


def lower(run: object, *specs: jax.ShapeDtypeStruct, device_kind: str = "TPU v5 lite") -> str:
    with targeting(device_kind):
        return jax.jit(run).trace(*specs).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_kernel_of_a_model_lowers_to_one_call(kernel: str, model: str, dtype: object) -> None:
    text = lower(function(kernel), *arguments(kernel, MODELS[model], dtype))
    assert text.count("tpu_custom_call") == 1 and "paged_walk" in text


@pytest.mark.parametrize("kernel", ["decode", "extend"])
def test_kernel_with_window_cap_and_starts_lowers(kernel: str) -> None:
    specs = arguments(kernel, MODELS["8b"], jnp.bfloat16)
    specs += [specs[4]] if kernel == "decode" else []
    assert "tpu_custom_call" in lower(function(kernel, sliding_window=1000, soft_cap=30.0), *specs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_pages_of_one_token_are_refused_before_lowering(kernel: str) -> None:
    with pytest.raises(UnsupportedKernel, match="page_size=1: expected a multiple of 8"):
        lower(function(kernel), *arguments(kernel, MODELS["8b"], jnp.bfloat16, page_size=1))


@pytest.mark.parametrize("device_kind, is_served", [("TPU v4", False), ("TPU v5 lite", False), ("TPU v6 lite", True)])
def test_blocks_of_16_mib_are_served_where_vmem_has_more(device_kind: str, is_served: bool) -> None:
    """Two buffers of 2,048 tokens x 4 KiB take 16 MiB, all that v4 and v5e grant a kernel; v6e grants 32."""
    call, specs = function("decode", blocks=DecodeBlocks(2048)), arguments("decode", MODELS["8b"], jnp.bfloat16)
    if is_served:
        assert "tpu_custom_call" in lower(call, *specs, device_kind=device_kind)
    else:
        with pytest.raises(UnsupportedKernel, match=r"take 1[\d,]+ bytes of VMEM of 16,252,928"):
            lower(call, *specs, device_kind=device_kind)


def test_rule_takes_smaller_blocks_where_vmem_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = arguments("extend", MODELS["8b"], jnp.bfloat16)
    monkeypatch.setattr(pallas_tpu_budget, "vmem_budget", lambda: 3 << 20)
    assert "tpu_custom_call" in lower(function("extend"), *specs)
    monkeypatch.setattr(pallas_tpu_budget, "vmem_budget", lambda: 1 << 18)
    with pytest.raises(UnsupportedKernel, match="extend: 8 kv heads of 128 with 8 x 32 queries of bfloat16"):
        lower(function("extend"), *specs)


def test_operation_that_mosaic_lacks_fails_to_lower() -> None:
    """What makes the tests above mean something."""
    def kernel(x: jax.Ref, out: jax.Ref) -> None:
        out[...] = jnp.linalg.cholesky(x[...])

    spec = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    with pytest.raises(NotImplementedError, match="[Cc]holesky"):
        lower(pl.pallas_call(kernel, out_shape=spec), spec)
