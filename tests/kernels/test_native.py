"""The native CPU kernels against float64 NumPy: shapes, types, ragged rows, poisoned slots, bits, errors, compiler."""
from __future__ import annotations

import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jradix.ops import attention_native as native
from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.merge import merge
from tests.kernels import reference
from tests.kernels.matrix_unit import HAS_MATRIX_UNIT
from tests.kernels.reference import Pool, make_pool

# float32 sums over up to 2,500 keys of unit variance, D up to 256: 2e-6 is seen. The reference reads the rounded pages,
# so that the type of the pages costs nothing.
TOLERANCE = 1e-5
REPOSITORY = Path(__file__).parents[2]
LENGTHS = (0, 1, 7, 16, 64, 65, 130, 1030, 2500)


@pytest.fixture(autouse=True)
def compiled() -> None:
    if native.why_not(backend="cpu") is not None:
        pytest.skip(f"{native.why_not(backend='cpu')}")


@functools.cache
def jitted(name: str, **settings: Any) -> Any:
    return jax.jit(functools.partial(getattr(native, name), **settings))


def as_type(pool: Pool, dtype: str) -> tuple[tuple[Array, Array, np.ndarray], Pool]:
    """The pool as the kernel takes it, and what the reference reads: the rounded numbers."""
    pages = [jnp.asarray(array, dtype) for array in (pool.k_pages, pool.v_pages)]
    return (*pages, pool.page_table), Pool(*(np.asarray(array.astype(jnp.float32)) for array in pages), pool.page_table)


def check(got: tuple[Array, Array], expected: tuple[np.ndarray, np.ndarray], tolerance: float = TOLERANCE) -> None:
    out, lse = (np.asarray(array) for array in got)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out, expected[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected[1], rtol=tolerance, atol=tolerance)


def tolerance_of_many_rows(dtype: str, head_dim: int) -> float:
    """Beside bfloat16 pages a matrix unit takes queries and weights rounded by up to 2^-9 of themselves."""
    return 2.0**-7 if HAS_MATRIX_UNIT and dtype == "bfloat16" and head_dim % 32 == 0 else TOLERANCE


def queries(num: int, heads: int, head_dim: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, heads, head_dim)).astype(np.float32)


def rows(lengths: tuple[int, ...] = LENGTHS, *, page_size: int = 16, kv_heads: int = 2, head_dim: int = 64,
         **options: Any) -> Pool:
    return make_pool(np.random.default_rng(0), lengths, page_size=page_size, width=kv_heads * head_dim, **options)


SHAPES = [(1, 2, 1, 8, "float32"), (8, 1, 2, 96, "float16"), (16, 3, 3, 64, "float32"), (64, 2, 4, 128, "bfloat16"),
          (16, 1, 8, 256, "float32"), (16, 3, 3, 64, "float16"), (16, 3, 3, 64, "bfloat16"), (8, 2, 5, 40, "float32"),
          (16, 1, 64, 24, "bfloat16"), (64, 1, 1, 80, "float32")]


@pytest.mark.parametrize("page_size, kv_heads, group, head_dim, dtype", SHAPES)
def test_decode_of_ragged_rows_equals_float64(page_size: int, kv_heads: int, group: int, head_dim: int,
                                              dtype: str) -> None:
    pages, pool = as_type(rows(page_size=page_size, kv_heads=kv_heads, head_dim=head_dim), dtype)
    q = queries(len(LENGTHS), kv_heads * group, head_dim)
    got = jitted("decode", sm_scale=head_dim**-0.5)(q, *pages, np.int32(LENGTHS))
    check(got, reference.decode(q, *pool, LENGTHS, sm_scale=head_dim**-0.5))


@pytest.mark.parametrize("page_size, kv_heads, group, head_dim, dtype", SHAPES)
def test_extend_of_ragged_rows_equals_float64(page_size: int, kv_heads: int, group: int, head_dim: int,
                                              dtype: str) -> None:
    lengths, q_lens = (0, 1, 7, 64, 200, 1100), (0, 1, 7, 0, 70, 20)
    pages, pool = as_type(rows(lengths, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim), dtype)
    cu_q_lens = np.int32([0, *np.cumsum(q_lens)])
    q = queries(cu_q_lens[-1] + 3, kv_heads * group, head_dim)
    got = jitted("extend", sm_scale=head_dim**-0.5)(q, *pages, np.int32(lengths), cu_q_lens)
    check(got, reference.extend(q, *pool, lengths, cu_q_lens, sm_scale=head_dim**-0.5),
          tolerance_of_many_rows(dtype, head_dim))


@pytest.mark.parametrize("page_size, kv_heads, group, head_dim, dtype", SHAPES)
def test_shared_prefix_of_groups_equals_float64(page_size: int, kv_heads: int, group: int, head_dim: int,
                                                dtype: str) -> None:
    lengths = (2048, 64, 192, 0)
    pages, pool = as_type(rows(lengths, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim), dtype)
    members = np.int32([[0, 7, 2, 8], [9, 9, 9, 9], [9, 1, 9, 3], [4, 5, 9, 9]])       # 9 rows
    q = queries(9, kv_heads * group, head_dim)
    out, lse = jitted("shared_prefix", sm_scale=head_dim**-0.5)(q, *pages, np.int32(lengths), members)
    assert np.isneginf(lse[3]).all()
    check((out[:3], lse[:3]), [x[:3] for x in reference.shared_prefix(q, *pool, lengths, members,
                                                                      sm_scale=head_dim**-0.5)],
          tolerance_of_many_rows(dtype, head_dim))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_group_in_parts_has_the_bits_of_the_parts_alone(dtype: str) -> None:
    """Parts of one group are read together, as many as there is room for; not across an empty or another group."""
    pages, _ = as_type(rows((1100, 1100)), dtype)
    one, two = pages[2][:1], pages[2][1:]
    table = np.concatenate([one, one, one, two, one, one, one, one, one, two])
    lens = np.int32([1088, 1088, 1088, 1088, 0, 1088, 1088, 1088, 1088, 64])
    members = np.full((10, 16), 130, np.int32)                          # 130: nobody
    members.reshape(-1)[:130] = np.arange(130)
    members[6, 3:9] = 130
    q, run = queries(130, 6, 64), jitted("shared_prefix", sm_scale=0.125)
    together = [np.asarray(array) for array in run(q, *pages[:2], table, lens, members)]
    for part in np.flatnonzero(lens):
        alone = run(q, *pages[:2], table[part:part + 1], lens[part:part + 1], members[part:part + 1])
        for got, expected in zip(alone, together):
            np.testing.assert_array_equal(got[0], expected[part])


@pytest.mark.parametrize("heads, window, soft_cap", [(4, 1, None), (4, 100, None), (16, 1500, 2.0), (6, None, 30.0)])
def test_decode_with_window_cap_and_starts_equals_float64(heads: int, window: int | None,
                                                          soft_cap: float | None) -> None:
    starts = np.int32([0, 0, 5, 16, 3, 64, 48, 1025, 1900])         # a start at the end, one of no whole page
    oldest = np.maximum(starts, 0 if window is None else np.int32(LENGTHS) - window)
    pool, q = rows(first_owned=oldest), queries(len(LENGTHS), heads, 64)
    settings = dict(sm_scale=0.2, sliding_window=window, soft_cap=soft_cap)
    got = jitted("decode", **settings)(q, *pool, np.int32(LENGTHS), starts)
    check(got, reference.decode(q, *pool, LENGTHS, starts, **settings))


@pytest.mark.parametrize("window, soft_cap", [(1, None), (40, None), (1000, 2.0), (None, 30.0)])
def test_extend_with_window_and_cap_equals_float64(window: int | None, soft_cap: float | None) -> None:
    lengths, q_lens = (90, 1200), (90, 150)
    oldest = [0 if window is None else max(n - k + 1 - window, 0) for n, k in zip(lengths, q_lens)]
    pool, cu_q_lens = rows(lengths, first_owned=oldest), np.int32([0, 90, 240])
    q, settings = queries(240, 6, 64), dict(sm_scale=0.2, sliding_window=window, soft_cap=soft_cap)
    got = jitted("extend", **settings)(q, *pool, np.int32(lengths), cu_q_lens)
    check(got, reference.extend(q, *pool, lengths, cu_q_lens, **settings))


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf])
def test_slots_nobody_owns_whatever_they_hold_change_no_bit(fill: float) -> None:
    lengths, cu_q_lens = (5, 70, 1100), np.int32([0, 3, 60, 61])
    q = queries(61, 6, 64)
    results = []
    for pool in (rows(lengths, fill=fill), rows(lengths, fill=0)):
        decoded = jitted("decode", sm_scale=0.125, sliding_window=1050)(q[:3], *pool, np.int32(lengths))
        extended = jitted("extend", sm_scale=0.125)(q, *pool, np.int32(lengths), cu_q_lens)
        results.append([np.asarray(array) for array in (*decoded, *extended)])
    for poisoned, clean in zip(*results):
        np.testing.assert_array_equal(poisoned, clean)


def test_rows_left_out_are_zero_and_cost_no_pages() -> None:
    pool, lengths = rows((30, 40, 50)), np.int32([30, 40, 50])
    pool.page_table[2] = 10**6                                      # no such page: an error if it were read
    q = queries(3, 4, 64)
    out, lse = jitted("decode", sm_scale=0.125)(q, *pool, lengths, None, np.int32(2))
    assert np.isfinite(lse[:2]).all() and np.isneginf(lse[2]).all() and not np.asarray(out[2]).any()
    pool.page_table[[0, 2]] = pool.page_table[[2, 0]]
    out, lse = jitted("extend", sm_scale=0.125)(q, *pool, np.int32([30, 40, 30]), np.int32([0, 1, 2, 3]), np.int32(1))
    assert np.isfinite(lse[1:]).all() and np.isneginf(lse[0]).all() and not np.asarray(out[0]).any()


def test_prefix_and_rest_merged_equal_the_whole() -> None:
    pool, lengths = rows((2048 + 20, 2048 + 33)), np.int32([2068, 2081])
    pool.page_table[1, :128] = pool.page_table[0, :128]
    q = queries(2, 6, 64)
    prefix, prefix_lse = jitted("shared_prefix", sm_scale=0.125)(q, *pool[:2], pool.page_table[:1], np.int32([2048]),
                                                                 np.int32([[0, 1]]))
    rest = jitted("decode", sm_scale=0.125)(q, *pool, lengths, np.int32([2048, 2048]))
    check(merge((prefix[0], rest[0]), (prefix_lse[0], rest[1])), reference.decode(q, *pool, lengths, sm_scale=0.125))


def test_weights_of_scores_down_to_the_smallest_are_within_4_ulp() -> None:
    scores = np.concatenate([-np.linspace(0, 87, 2000), [-89.0, -200.0, -1e30, -3e38]]).astype(np.float32)
    count = len(scores)
    k_pages, v_pages = np.zeros((count + 1, 2, 8), np.float32), np.zeros((count + 1, 2, 8), np.float32)
    k_pages[1:, 1, 0], v_pages[1:, 1] = scores, 1                   # the first key scores 0 and holds 0
    q = np.zeros((count, 1, 8), np.float32)
    q[:, 0, 0] = 1
    table = np.arange(1, count + 1, dtype=np.int32)[:, None]
    out, _ = jitted("decode", sm_scale=1.0)(q, k_pages, v_pages, table, np.full(count, 2, np.int32))
    weights = np.exp(scores.astype(np.float64))
    # Scores are rounded in units of log2: half an ulp of up to 126, of which the weight is the power.
    tolerance = 4 * 2.0**-23 + np.abs(scores.astype(np.float64)).clip(0, 90) * 2.0**-23
    assert (np.abs(out[:, 0, 0] - weights / (1 + weights)) <= tolerance * weights + 1.2e-38).all()
    assert not np.asarray(out[-3:]).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["decode", "extend"])
def test_every_number_of_a_half_type_is_read_exactly(name: str, dtype: str) -> None:
    values = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype)).astype(np.float32).reshape(1024, 1, 64)
    is_tiny = np.abs(values) < 2.0**-126                            # flushed to zero on XLA's threads
    table, ones = np.arange(1024, dtype=np.int32)[:, None], np.ones(1024, np.int32)
    with np.errstate(invalid="ignore"):                             # NaN is among them
        v_pages = jnp.asarray(values, dtype)
    arguments = np.zeros((1024, 8, 8), np.float32), jnp.zeros_like(v_pages), v_pages, table, ones
    cu_q_lens = () if name == "decode" else (np.arange(1025, dtype=np.int32),)
    out, _ = jitted(name, sm_scale=1.0)(*arguments, *cu_q_lens)
    np.testing.assert_array_equal(np.where(is_tiny, 0, out.reshape(values.shape)), np.where(is_tiny, 0, values))


@pytest.mark.parametrize("group", [3, 8])
def test_rows_alone_and_in_a_batch_have_equal_bits(group: int) -> None:
    pool, q = rows(), queries(len(LENGTHS), 2 * group, 64)
    run = jitted("decode", sm_scale=0.125)
    together = [np.asarray(array) for array in run(q, *pool, np.int32(LENGTHS))]
    for row in range(len(LENGTHS)):
        alone = run(q[row:row + 1], *pool[:2], pool.page_table[row:row + 1], np.int32(LENGTHS[row:row + 1]))
        for got, expected in zip(alone, together):
            np.testing.assert_array_equal(got[0], expected[row])


def test_members_of_a_group_alone_and_together_have_equal_bits() -> None:
    pool, q = rows((1300,)), queries(16, 6, 64)
    run = functools.partial(jitted("shared_prefix", sm_scale=0.125), q, *pool[:2], pool.page_table, np.int32([1296]))
    together = [np.asarray(array[0]) for array in run(np.arange(16, dtype=np.int32)[None])]
    for members in ([5], [15, 16, 0], [16, 3, 4, 9, 2, 16, 7]):         # 16: nobody
        for got, expected in zip(run(np.int32([members])), together):
            for place, row in enumerate(members):
                if row < 16:
                    np.testing.assert_array_equal(got[0, place], expected[row])


def test_a_prompt_in_one_chunk_and_in_several_has_equal_bits() -> None:
    pool, q, run = rows((300,)), queries(300, 6, 64), jitted("extend", sm_scale=0.125)
    whole, whole_lse = run(q, *pool, np.int32([300]), np.int32([0, 300]))
    for start, end in ((0, 77), (77, 78), (78, 300)):
        part, part_lse = run(q[start:end], *pool, np.int32([end]), np.int32([0, end - start]))
        np.testing.assert_array_equal(part, whole[start:end])
        np.testing.assert_array_equal(part_lse, whole_lse[start:end])


ONE_THREAD = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
from tests.kernels import test_native
np.savez(sys.argv[1], *test_native.large_batch())
"""


def large_batch() -> list[np.ndarray]:
    pool, q = rows((3000, 700, 2100)), queries(200, 6, 64)
    decoded = jitted("decode", sm_scale=0.125)(q[:3], *pool, np.int32([3000, 700, 2100]))
    extended = jitted("extend", sm_scale=0.125)(q, *pool, np.int32([3000, 700, 2100]), np.int32([0, 1, 150, 200]))
    shared = jitted("shared_prefix", sm_scale=0.125)(q, *pool, np.int32([2992, 0, 2096]),
                                                     np.int32([[0, 1, 2], [3, 4, 200], [5, 200, 6]]))
    one_head = jitted("shared_prefix", sm_scale=0.1)(q.reshape(200, 3, 128), *pool[:2], pool.page_table[:1],
                                                     np.int32([2992]), np.arange(13, dtype=np.int32)[None])
    real_groups = [array[::2] for array in shared]
    return [np.asarray(array) for array in (*decoded, *extended, *real_groups, *one_head)]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot tie a process to one CPU")
def test_one_thread_and_all_threads_give_equal_bits(tmp_path: Path) -> None:
    environment = os.environ | dict(JAX_PLATFORMS="cpu", PYTHONPATH=str(REPOSITORY))
    subprocess.run([sys.executable, "-c", ONE_THREAD, str(tmp_path / "one.npz")], env=environment, cwd=REPOSITORY,
                   check=True)
    with np.load(tmp_path / "one.npz") as one:
        for alone, together in zip(one.values(), large_batch(), strict=True):
            np.testing.assert_array_equal(alone, together)


def test_calls_from_several_threads_at_once_do_not_disturb_each_other() -> None:
    expected = large_batch()
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(lambda _: large_batch(), range(12)):
            for array, other in zip(got, expected):
                np.testing.assert_array_equal(array, other)


def test_decode_inside_a_loop_follows_lengths_and_pages() -> None:
    pool, q = rows((90,)), queries(1, 4, 64)

    @jax.jit
    def outs(k_pages: Array, v_pages: Array) -> Array:
        def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            v_pages, found = carry
            out, _ = native.decode(q, k_pages, v_pages, pool.page_table, jnp.full(1, 80) + i, sm_scale=0.125)
            return v_pages * 2, found.at[i].set(out[0])

        return jax.lax.fori_loop(0, 4, step, (v_pages, jnp.zeros((4, 4, 64))))[1]

    found = outs(*pool[:2])
    for i in range(4):
        doubled = Pool(pool.k_pages, pool.v_pages * 2**i, pool.page_table)
        np.testing.assert_allclose(found[i], reference.decode(q, *doubled, [80 + i], sm_scale=0.125)[0][0],
                                   atol=10 * TOLERANCE)


def test_a_donated_pool_stays_in_place() -> None:
    pool, q = rows((40,)), queries(1, 4, 64)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(k_pages: Array, v_pages: Array) -> tuple[Array, Array, Array]:
        k_pages, v_pages = (pages.at[pool.page_table[0, 2], 8].set(1.0) for pages in (k_pages, v_pages))
        out, _ = native.decode(q, k_pages, v_pages, pool.page_table, jnp.int32([41]), sm_scale=0.125)
        return k_pages, v_pages, out

    k_pages, v_pages = (jnp.array(pages) for pages in pool[:2])
    places = k_pages.unsafe_buffer_pointer(), v_pages.unsafe_buffer_pointer()
    k_pages, v_pages, out = step(k_pages, v_pages)
    assert (k_pages.unsafe_buffer_pointer(), v_pages.unsafe_buffer_pointer()) == places
    pool.k_pages[pool.page_table[0, 2], 8] = pool.v_pages[pool.page_table[0, 2], 8] = 1
    np.testing.assert_allclose(out, reference.decode(q, *pool, [41], sm_scale=0.125)[0], atol=TOLERANCE)


@pytest.mark.parametrize("page", [-1, 10**6])
def test_a_page_that_does_not_exist_is_an_error_that_names_it(page: int) -> None:
    pool, q = rows((20, 40)), queries(2, 4, 64)
    pool.page_table[1, 2] = page
    with pytest.raises(Exception, match=f"page {page} in column 2 of row 1"):
        jax.block_until_ready(jitted("decode", sm_scale=0.125)(q, *pool, np.int32([20, 40])))
    with pytest.raises(Exception, match=f"page {page} in column 2 of row 1"):
        jax.block_until_ready(jitted("extend", sm_scale=0.125)(q, *pool, np.int32([20, 40]), np.int32([0, 1, 2])))
    with pytest.raises(Exception, match=f"page {page} in column 2 of row 1"):
        jax.block_until_ready(jitted("shared_prefix", sm_scale=0.125)(q, *pool, np.int32([16, 40]),
                                                                      np.int32([[0], [1]])))
    out, _ = jitted("decode", sm_scale=0.125)(q, *pool, np.int32([20, 32]))          # that page is not read
    assert np.isfinite(out).all()


@pytest.mark.parametrize("kv_lens, cu_q_lens, said", [
    ([20, 49], [0, 1, 2], "row 1 has 49 tokens; its page table holds 3 pages of 16"),
    ([20, 40], [0, 1, 3], "row 1 has tokens 1 to 3 of 2"), ([20, 40], [0, 2, 1], "row 1 has tokens 2 to 1"),
    ([20, 1], [0, 0, 2], "row 1 has tokens 0 to 2 of 2 and a context of 1")])
def test_lengths_that_contradict_each_other_are_errors(kv_lens: list[int], cu_q_lens: list[int], said: str) -> None:
    pool, q = rows((20, 40)), queries(2, 4, 64)
    with pytest.raises(Exception, match=said):
        jax.block_until_ready(jitted("extend", sm_scale=0.125)(q, *pool, np.int32(kv_lens), np.int32(cu_q_lens)))


def test_arrays_whose_shapes_do_not_fit_are_errors() -> None:
    pool, q = rows((20, 40)), queries(2, 4, 64)
    with pytest.raises(Exception, match="axis 0 of kv_lens is 3; expected 2"):
        jax.block_until_ready(jitted("decode", sm_scale=0.125)(q, *pool, np.int32([20, 40, 1])))
    with pytest.raises(Exception, match="2 cu_q_lens for 2 rows; expected 3"):
        jax.block_until_ready(jitted("extend", sm_scale=0.125)(q, *pool, np.int32([20, 40]), np.int32([0, 1])))


def test_what_is_not_served_is_refused_with_the_reason() -> None:
    q, pages, table, lens = (jnp.zeros(shape) for shape in ((1, 4, 12), (2, 16, 24), (1, 1), (1,)))
    with pytest.raises(UnsupportedKernel, match="head_dim=12; expected a multiple of 8"):
        native.decode(q, pages, pages, table, lens, sm_scale=1.0)
    with pytest.raises(UnsupportedKernel, match="query heads in multiples of Hkv"):
        native.decode(jnp.zeros((1, 4, 8)), pages, pages, table, lens, sm_scale=1.0)
    with pytest.raises(ValueError, match="sliding_window=0"):
        native.decode(jnp.zeros((1, 3, 8)), pages, pages, table, lens, sm_scale=1.0, sliding_window=0)
    assert "pages of int8" in (native.why_not(jnp.int8, backend="cpu") or "")
    assert "65 query heads" in (native.why_not(group=65, backend="cpu") or "")
    assert "not on gpu" in (native.why_not(backend="gpu") or "")
