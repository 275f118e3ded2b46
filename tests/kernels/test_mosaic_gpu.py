"""The Hopper kernels, interpreted with race detection, against the float64 reference: pages, heads, ragged lengths."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import mosaic_gpu
from pallas_kernels.blocks import DecodeBlocks, ExtendBlocks, SharedBlocks
from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.merge import merge

interpreted = pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"),
                                 reason="jax before 0.11 has no interpreter of Mosaic GPU kernels")
# Weights are rounded to 8 (bfloat16) or 11 bits (float16) and sum to 1, values are of unit variance: 0.0025 is seen.
TOLERANCE = {jnp.bfloat16: 6e-3, jnp.float16: 8e-4}
LSE_TOLERANCE = 2e-5     # float32 sums


@pytest.fixture
def hopper() -> Iterator[Any]:
    """The kernels' argument `interpret`, in the mesh of a GPU that is not there."""
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield plgpu.InterpretGPUParams(detect_races=True)


def check(kernel: Callable[..., Any], oracle: Callable[..., Any], arrays: Sequence[Any], dtype: Any, interpret: Any,
          blocks: Any = None, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """Runs q, k_pages and v_pages in `dtype`, and compares with the reference on the same rounded numbers."""
    rounded = [jnp.asarray(array, dtype) for array in arrays[:3]]
    # The interpreter's callbacks take the time, so XLA need not optimise what lies between them.
    run = jax.jit(lambda *a: kernel(*a, blocks=blocks, interpret=interpret, **settings),
                  compiler_options={"xla_backend_optimization_level": 0})
    out, lse = (np.asarray(array) for array in run(*rounded, *(jnp.asarray(a, jnp.int32) for a in arrays[3:])))
    expected, expected_lse = oracle(*(np.asarray(a, np.float32) for a in rounded), *arrays[3:], **settings)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out, expected, atol=TOLERANCE[dtype], rtol=0)
    np.testing.assert_allclose(lse, expected_lse, atol=LSE_TOLERANCE, rtol=LSE_TOLERANCE)
    return out, lse


def decode_case(interpret: Any, kv_lens: Sequence[int], *, page_size: int, group: int, head_dim: int,
                kv_heads: int = 1, dtype: Any = jnp.bfloat16, blocks: DecodeBlocks | None = None,
                kv_starts: Sequence[int] | None = None, **settings: Any) -> None:
    random = np.random.default_rng(0)
    window = settings.get("sliding_window")
    firsts = [max(0 if kv_starts is None else kv_starts[i], 0 if window is None else n - window)
              for i, n in enumerate(kv_lens)]
    pool = reference.make_pool(random, kv_lens, page_size=page_size, width=kv_heads * head_dim, first_owned=firsts)
    q = random.standard_normal((len(kv_lens), kv_heads * group, head_dim))
    check(mosaic_gpu.decode, reference.decode, [q, *pool, kv_lens, *([] if kv_starts is None else [kv_starts])], dtype,
          interpret, blocks, sm_scale=head_dim**-0.5, **settings)


def extend_case(interpret: Any, kv_lens: Sequence[int], q_lens: Sequence[int], *, page_size: int, group: int,
                head_dim: int, kv_heads: int = 1, dtype: Any = jnp.bfloat16, padding: int = 0,
                blocks: ExtendBlocks | None = None, **settings: Any) -> None:
    random = np.random.default_rng(1)
    window = settings.get("sliding_window")
    firsts = [0 if window is None else max(n - m + 1 - window, 0) for n, m in zip(kv_lens, q_lens)]
    pool = reference.make_pool(random, kv_lens, page_size=page_size, width=kv_heads * head_dim, first_owned=firsts)
    cu_q_lens = np.array([0, *itertools.accumulate(q_lens)])
    q = random.standard_normal((cu_q_lens[-1] + padding, kv_heads * group, head_dim))
    q[cu_q_lens[-1]:] = np.nan
    out, _ = check(mosaic_gpu.extend, reference.extend, [q, *pool, kv_lens, cu_q_lens], dtype, interpret, blocks,
                   sm_scale=head_dim**-0.5, **settings)
    assert not out[cu_q_lens[-1]:].any()


def shared_case(interpret: Any, prefix_lens: Sequence[int], members: Sequence[Sequence[int]], *, num_rows: int,
                page_size: int, group: int, head_dim: int, kv_heads: int = 1, dtype: Any = jnp.bfloat16,
                blocks: SharedBlocks | None = None, **settings: Any) -> None:
    random = np.random.default_rng(2)
    pool = reference.make_pool(random, prefix_lens, page_size=page_size, width=kv_heads * head_dim)
    q = random.standard_normal((num_rows, kv_heads * group, head_dim))
    check(mosaic_gpu.shared_prefix, reference.shared_prefix, [q, *pool, prefix_lens, np.array(members)], dtype,
          interpret, blocks, sm_scale=head_dim**-0.5, **settings)


@interpreted
def test_decode_ragged_lengths_match_reference(hopper: Any) -> None:
    decode_case(hopper, (0, 1, 8, 133), page_size=8, group=1, head_dim=64, blocks=DecodeBlocks(64))


@interpreted
def test_decode_window_and_cap_in_splits_match_reference(hopper: Any) -> None:
    decode_case(hopper, (5, 200), page_size=16, group=2, kv_heads=2, head_dim=128, dtype=jnp.float16,
                sliding_window=150, soft_cap=2.0, blocks=DecodeBlocks(64, num_stages=2, num_splits=2))


@interpreted
def test_decode_from_kv_starts_matches_reference(hopper: Any) -> None:
    decode_case(hopper, (64, 200, 130), page_size=64, group=4, head_dim=96, kv_starts=(64, 64, 0))


@interpreted
def test_decode_steps_smaller_than_a_page_match_reference(hopper: Any) -> None:
    decode_case(hopper, (128, 200), page_size=128, group=8, head_dim=256, blocks=DecodeBlocks(64, num_stages=3))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("page_size", [8, 16, 24, 64, 128])
@pytest.mark.parametrize("group, head_dim", [(1, 256), (2, 64), (3, 64), (4, 128), (8, 96), (12, 32), (8, 192)])
def test_decode_pages_and_heads_match_reference(hopper: Any, page_size: int, group: int, head_dim: int) -> None:
    decode_case(hopper, (0, 1, page_size, 2 * page_size + 3, 150), page_size=page_size, group=group,
                head_dim=head_dim, soft_cap=20.0 if group == 4 else None)


@interpreted
def test_extend_rows_across_blocks_match_reference(hopper: Any) -> None:
    extend_case(hopper, (0, 40, 16, 140), (0, 40, 1, 65), page_size=16, group=2, head_dim=64, padding=7,
                blocks=ExtendBlocks(64, 64))


@interpreted
def test_extend_window_and_cap_match_reference(hopper: Any) -> None:
    extend_case(hopper, (230,), (130,), page_size=8, group=1, head_dim=128, dtype=jnp.float16, sliding_window=70,
                soft_cap=3.0, blocks=ExtendBlocks(128, 64))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("page_size", [8, 16, 64, 128])
@pytest.mark.parametrize("group, head_dim, sliding_window", [(1, 256, 33), (2, 128, None), (3, 64, 33), (4, 96, None),
                                                             (5, 64, None), (8, 64, 33)])
def test_extend_pages_and_heads_match_reference(hopper: Any, page_size: int, group: int, head_dim: int,
                                                sliding_window: int | None) -> None:
    extend_case(hopper, (20, 0, 130, 170), (20, 0, 128, 40), page_size=page_size, group=group, head_dim=head_dim,
                padding=3, sliding_window=sliding_window)


@interpreted
def test_shared_prefix_in_splits_matches_reference(hopper: Any) -> None:
    shared_case(hopper, (0, 16, 208), ((0, 5, 5), (1, 5, 5), (4, 2, 5)), num_rows=5, page_size=16, group=4, kv_heads=2,
                head_dim=64, blocks=SharedBlocks(64, num_splits=2))


@interpreted
def test_shared_prefix_of_more_rows_than_one_product_matches_reference(hopper: Any) -> None:
    shared_case(hopper, (192,), (range(20),), num_rows=18, page_size=64, group=8, head_dim=64, soft_cap=4.0)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("head_dim, num_rows", [(64, 30), (96, 9), (128, 24), (256, 24)])
@pytest.mark.parametrize("page_size", [8, 128])
def test_shared_prefix_heads_and_groups_match_reference(hopper: Any, head_dim: int, num_rows: int,
                                                        page_size: int) -> None:
    shared_case(hopper, (256, 128), (range(num_rows), range(num_rows)), num_rows=num_rows - 1, page_size=page_size,
                group=8, head_dim=head_dim)


@interpreted
@pytest.mark.slow
def test_shared_prefix_merged_with_decode_matches_whole_decode(hopper: Any) -> None:
    random = np.random.default_rng(3)
    pool = reference.make_pool(random, (32, 50, 70), page_size=16, width=128)
    table = pool.page_table.copy()
    table[1:, :2] = table[0, :2]
    rounded = [jnp.asarray(a, jnp.bfloat16) for a in (random.standard_normal((3, 4, 64)), *pool[:2])]
    own = mosaic_gpu.decode(*rounded, table, jnp.array([0, 50, 70]), jnp.array([0, 32, 32]), sm_scale=0.125,
                            interpret=hopper)
    shared = mosaic_gpu.shared_prefix(*rounded, table[:1], jnp.array([32]), jnp.array([[1, 2]]), sm_scale=0.125,
                                      interpret=hopper)
    out, lse = merge((own[0][1:], shared[0][0]), (own[1][1:], shared[1][0]))
    expected, expected_lse = reference.decode(*(np.asarray(a, np.float32) for a in rounded), table, (0, 50, 70),
                                              sm_scale=0.125)
    np.testing.assert_allclose(out, expected[1:], atol=TOLERANCE[jnp.bfloat16], rtol=0)
    np.testing.assert_allclose(lse, expected_lse[1:], atol=LSE_TOLERANCE)


@interpreted
@pytest.mark.parametrize("num_tokens", [16, 5])
def test_write_kv_slots_hold_the_new_rows_and_no_others_change(hopper: Any, num_tokens: int) -> None:
    random = np.random.default_rng(4)
    k_pages, v_pages = (jnp.asarray(random.standard_normal((5, 8, 192)), jnp.bfloat16) for _ in range(2))
    k, v = (jnp.asarray(random.standard_normal((num_tokens, 192)), jnp.bfloat16) for _ in range(2))
    slots = random.permutation(40)[:num_tokens]
    slots[0], slots[1] = 40, -1                                          # outside the pages: written nowhere
    got = jax.jit(lambda *a: mosaic_gpu.write_kv(*a, interpret=hopper))(k_pages, v_pages, k, v, slots)
    for pages, rows, written in zip((k_pages, v_pages), (k, v), got):
        expected = np.array(pages, np.float32).reshape(40, 192)
        expected[slots[2:]] = np.asarray(rows, np.float32)[2:]
        np.testing.assert_array_equal(np.asarray(written, np.float32).reshape(40, 192), expected)


def arguments(dtype: Any = jnp.bfloat16, *, heads: int = 4, kv_heads: int = 2, head_dim: int = 64,
              page_size: int = 16, pages_dtype: Any = None) -> list[Any]:
    pages = jnp.zeros((3, page_size, kv_heads * head_dim), pages_dtype or dtype)
    return [jnp.zeros((2, heads, head_dim), dtype), pages, pages, jnp.zeros((2, 2), jnp.int32)]


@pytest.mark.parametrize("given, names", [
    (dict(dtype=jnp.float32), "float32"),
    (dict(pages_dtype=jnp.float16), "float16"),
    (dict(page_size=12), "page_size=12"),
    (dict(head_dim=80), "head_dim=80"),
    (dict(head_dim=288), "head_dim=288"),
    (dict(heads=5), "5 query heads"),
])
def test_kernels_shapes_and_types_not_served_are_refused_by_name(given: dict[str, Any], names: str) -> None:
    q, k_pages, v_pages, table = arguments(**given)
    lens = jnp.ones(2, jnp.int32)
    for call in (lambda: mosaic_gpu.decode(q, k_pages, v_pages, table, lens, sm_scale=1.0),
                 lambda: mosaic_gpu.extend(q, k_pages, v_pages, table, lens, jnp.arange(3), sm_scale=1.0),
                 lambda: mosaic_gpu.shared_prefix(q, k_pages, v_pages, table, lens, jnp.zeros((2, 2), jnp.int32),
                                                  sm_scale=1.0)):
        with pytest.raises(UnsupportedKernel, match=names):
            call()


@pytest.mark.parametrize("blocks, names", [
    (DecodeBlocks(64, num_stages=8), r"278,736 bytes of shared memory: expected at most 232,448"),
    (DecodeBlocks(16), "kv_tokens of 64"),
    (DecodeBlocks(64, num_splits=0), "num_splits of at least 1"),
    (ExtendBlocks(64, 64), "DecodeBlocks"),
])
def test_decode_blocks_that_do_not_fit_are_refused_with_numbers(blocks: Any, names: str) -> None:
    with pytest.raises(UnsupportedKernel, match=names):
        mosaic_gpu.decode(*arguments(head_dim=128), jnp.ones(2, jnp.int32), sm_scale=1.0, blocks=blocks)


def test_extend_more_queries_than_warpgroups_are_refused() -> None:
    with pytest.raises(UnsupportedKernel, match="q_tokens=256"):
        mosaic_gpu.extend(*arguments(), jnp.ones(2, jnp.int32), jnp.arange(3), sm_scale=1.0,
                          blocks=ExtendBlocks(256, 64))


def test_write_kv_rows_of_another_width_are_refused() -> None:
    _, k_pages, v_pages, _ = arguments()
    with pytest.raises(UnsupportedKernel, match=r"k \(2, 64\)"):
        mosaic_gpu.write_kv(k_pages, v_pages, jnp.zeros((2, 64)), jnp.zeros((2, 64)), jnp.zeros(2, jnp.int32))


@pytest.mark.skipif(hasattr(plgpu, "InterpretGPUParams"), reason="jax from 0.11 on interprets Mosaic GPU kernels")
def test_interpretation_without_an_interpreter_is_refused() -> None:
    with pytest.raises(UnsupportedKernel, match="jax 0.11"):
        mosaic_gpu.decode(*arguments(), jnp.ones(2, jnp.int32), sm_scale=1.0, interpret=True)
