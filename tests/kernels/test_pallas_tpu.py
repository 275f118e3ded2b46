"""The TPU kernels, interpreted with race detection, against float64 NumPy: ragged rows, windows, poisoned slots."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import pallas_tpu, pallas_tpu_budget
from pallas_kernels.blocks import DecodeBlocks, ExtendBlocks, SharedBlocks
from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.merge import merge
from tests.kernels import reference

INTERPRET = pltpu.InterpretParams(detect_races=True)
TOLERANCE = 5e-6     # float32 sums over up to 260 keys of unit variance; 6e-7 is seen
BF16 = 0.02          # weights are rounded to 8 bits before they meet the values; operands are the same on both sides


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    pltpu.reset_tpu_interpret_mode_state()              # what a test that failed inside the interpreter leaves
    assert "RACE DETECTED" not in capfd.readouterr().out


def compare(got: tuple[jax.Array, jax.Array], expected: tuple[np.ndarray, np.ndarray],
            tolerance: float = TOLERANCE) -> None:
    assert got[0].dtype == got[1].dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got[0]), expected[0], atol=tolerance, rtol=0)
    np.testing.assert_allclose(np.asarray(got[1]), expected[1], atol=tolerance, rtol=tolerance)


def run(kernel: Callable, q: np.ndarray, pool: reference.Pool, *tables: object,
        **settings: object) -> tuple[jax.Array, jax.Array]:
    """A kernel, jitted and interpreted; `tables` follow the page table."""
    tables = [None if table is None else jnp.asarray(table, jnp.int32) for table in tables]
    return compiled(kernel, **settings)(q, *pool, *tables)


@functools.cache
def compiled(kernel: Callable, **settings: object) -> Callable:
    return jax.jit(functools.partial(kernel, interpret=INTERPRET, **settings))


def queries(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def check_decode(kv_lens: Sequence[int], *, kv_heads: int, group: int, head_dim: int, page_size: int,
                 blocks: DecodeBlocks | None, kv_starts: Sequence[int] | None = None, dtype: object = jnp.float32,
                 fill: float = np.nan, tolerance: float = TOLERANCE, **settings: object) -> jax.Array:
    random = np.random.default_rng(page_size)
    window = settings.get("sliding_window") or 10**6
    starts = [0] * len(kv_lens) if kv_starts is None else kv_starts
    oldest = [max(length - window, start, 0) for length, start in zip(kv_lens, starts)]
    pool = reference.make_pool(random, kv_lens, page_size=page_size, width=kv_heads * head_dim, first_owned=oldest,
                               fill=fill)
    pool = reference.Pool(*(pages.astype(dtype) for pages in pool[:2]), pool.page_table)
    q = queries(random, len(kv_lens), kv_heads * group, head_dim).astype(dtype)
    settings = dict(sm_scale=head_dim ** -0.5, **settings)
    got = run(pallas_tpu.decode, q, pool, kv_lens, kv_starts, blocks=blocks, **settings)
    compare(got, reference.decode(q, *pool, kv_lens, kv_starts, **settings), tolerance)
    return got[0]


def check_extend(kv_lens: Sequence[int], q_lens: Sequence[int], *, kv_heads: int, group: int, head_dim: int,
                 page_size: int, blocks: ExtendBlocks, num_padding_tokens: int = 0, **settings: object) -> None:
    random = np.random.default_rng(page_size)
    window = settings.get("sliding_window") or 10**6
    oldest = [max(length - tokens + 1 - window, 0) for length, tokens in zip(kv_lens, q_lens)]
    pool = reference.make_pool(random, kv_lens, page_size=page_size, width=kv_heads * head_dim, first_owned=oldest)
    cu_q_lens = np.cumsum([0, *q_lens])
    q = queries(random, cu_q_lens[-1] + num_padding_tokens, kv_heads * group, head_dim)
    q[cu_q_lens[-1]:] = np.nan
    settings = dict(sm_scale=head_dim ** -0.5, **settings)
    compare(run(pallas_tpu.extend, q, pool, kv_lens, cu_q_lens, blocks=blocks, **settings),
            reference.extend(q, *pool, kv_lens, cu_q_lens, **settings))


# -- decode


@pytest.mark.parametrize("kv_heads, group, head_dim, page_size, blocks", [
    (2, 1, 64, 8, DecodeBlocks(32, num_stages=3)),
    (3, 3, 64, 16, DecodeBlocks(16)),                       # a page is no multiple of 128 lanes
    (2, 4, 128, 32, DecodeBlocks(64, num_stages=1)),
    (1, 8, 256, 128, None)])
def test_decode_ragged_rows_match_the_reference(kv_heads: int, group: int, head_dim: int, page_size: int,
                                                blocks: DecodeBlocks | None) -> None:
    """Padding rows first, last and between; one token; exactly a page; several pages and a rest."""
    check_decode([0, 1, page_size, 0, 2 * page_size + 3, 5, 0], kv_heads=kv_heads, group=group, head_dim=head_dim,
                 page_size=page_size, blocks=blocks)


def test_decode_window_and_soft_cap_see_no_older_key() -> None:
    check_decode([40, 1, 0, 65], kv_heads=2, group=2, head_dim=64, page_size=8, blocks=DecodeBlocks(16),
                 sliding_window=21, soft_cap=0.7)


def test_decode_kv_starts_skip_whole_pages() -> None:
    """A row that starts at its end sees nothing; a window may begin before or after the start."""
    check_decode([40, 16, 50, 33], kv_starts=[16, 16, 0, 32], kv_heads=1, group=2, head_dim=128, page_size=16,
                 blocks=DecodeBlocks(32), sliding_window=30)


def test_decode_bfloat16_pages_match_the_reference() -> None:
    check_decode([40, 1, 0, 65], kv_heads=2, group=2, head_dim=128, page_size=16, blocks=DecodeBlocks(32),
                 dtype=jnp.bfloat16, tolerance=BF16)


@pytest.mark.slow
def test_decode_bits_do_not_depend_on_unowned_slots() -> None:
    outputs = [check_decode([9, 24, 1], kv_heads=2, group=1, head_dim=64, page_size=8, blocks=DecodeBlocks(16),
                            sliding_window=1, fill=fill) for fill in (0.0, np.nan, np.inf)]
    assert all(np.array_equal(outputs[0], other) for other in outputs[1:])


# -- extend


@pytest.mark.parametrize("kv_heads, group, head_dim, page_size, q_tokens", [
    (4, 2, 64, 8, 32), pytest.param(2, 8, 128, 16, 8, marks=pytest.mark.slow)])
def test_extend_ragged_rows_match_the_reference(kv_heads: int, group: int, head_dim: int, page_size: int,
                                                q_tokens: int) -> None:
    """Rows of no and of one token, over several tiles and several in one; tiles that only padding tokens fill."""
    check_extend([5, 0, 40, 16, 37, 3], [5, 0, 21, 1, 7, 0], kv_heads=kv_heads, group=group, head_dim=head_dim,
                 page_size=page_size, blocks=ExtendBlocks(q_tokens, 2 * page_size), num_padding_tokens=q_tokens + 14)


def test_extend_window_and_soft_cap_see_no_older_key() -> None:
    check_extend([33, 1, 70], [3, 1, 24], kv_heads=2, group=4, head_dim=128, page_size=16,
                 blocks=ExtendBlocks(32, 16, num_stages=3), sliding_window=9, soft_cap=2.0)


def test_extend_of_padding_only_gives_zeros() -> None:
    check_extend([0, 0], [0, 0], kv_heads=1, group=1, head_dim=64, page_size=32, blocks=ExtendBlocks(8, 32),
                 num_padding_tokens=20)


def test_extend_nan_of_one_row_stays_with_it() -> None:
    """Rows share tiles of queries and matrix products; a request whose own values overflowed harms no other."""
    random = np.random.default_rng(0)
    kv_lens, cu_q_lens = [12, 20, 9], [0, 5, 11, 16]
    pool = reference.make_pool(random, kv_lens, page_size=8, width=128)
    for pages in pool[:2]:
        pages[pool.page_table[1]] = np.nan
    q = queries(random, 16, 4, 64)
    out, lse = run(pallas_tpu.extend, q, pool, kv_lens, cu_q_lens, sm_scale=0.1, blocks=ExtendBlocks(16, 16))
    expected = reference.extend(q, *pool, kv_lens, cu_q_lens, sm_scale=0.1)
    assert np.isnan(out[5:11]).all()
    others = np.r_[0:5, 11:16]
    compare((out[others], lse[others]), (expected[0][others], expected[1][others]))


# -- shared prefix


def test_shared_prefix_groups_match_the_reference() -> None:
    """A group with gaps among its members, one without members, one without a prefix."""
    random = np.random.default_rng(0)
    lens = [32, 16, 0, 80]
    pool = reference.make_pool(random, lens, page_size=16, width=128)
    q = queries(random, 7, 4, 64)
    members = np.array([[0, 7, 2, 7, 7], [7] * 5, [0, 1, 7, 7, 7], [6, 3, 4, 5, 1]])
    settings = dict(sm_scale=0.125, soft_cap=1.5)
    got = run(pallas_tpu.shared_prefix, q, pool, lens, members, blocks=SharedBlocks(32), **settings)
    compare(got, reference.shared_prefix(q, *pool, lens, members, **settings))


def test_shared_prefix_of_more_members_than_fit_takes_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    pool = reference.make_pool(random, [24], page_size=8, width=128)
    q, members = queries(random, 40, 8, 128), np.arange(40)[None]
    tiles: list[int] = []
    choose = pallas_tpu.choose
    monkeypatch.setattr(pallas_tpu_budget, "vmem_budget", lambda: 1 << 20)
    monkeypatch.setattr(pallas_tpu, "choose", lambda *args: (layout := choose(*args), tiles.append(
        layout.tile_tokens))[0])
    got = run(pallas_tpu.shared_prefix, q, pool, [24], members, sm_scale=0.1, blocks=SharedBlocks(24))
    assert tiles == [16]
    compare(got, reference.shared_prefix(q, *pool, [24], members, sm_scale=0.1))


def test_shared_prefix_merged_with_own_keys_is_attention_to_all() -> None:
    """Rows 0 and 2 share three pages, row 1 stands alone: decode from `kv_starts` on completes them."""
    random = np.random.default_rng(0)
    kv_lens, prefix = [30, 11, 25], 24
    pool = reference.make_pool(random, kv_lens, page_size=8, width=128)
    pool.page_table[2, :3] = pool.page_table[0, :3]
    q = queries(random, 3, 2, 128)
    own = run(pallas_tpu.decode, q, pool, kv_lens, [prefix, 0, prefix], sm_scale=0.1, blocks=DecodeBlocks(16))
    shared = run(pallas_tpu.shared_prefix, q, pool._replace(page_table=pool.page_table[:1, :3]), [prefix], [[0, 2]],
                 sm_scale=0.1, blocks=SharedBlocks(16))
    whole = [jnp.zeros_like(own[0]), jnp.full_like(own[1], -jnp.inf)]
    whole = [part.at[jnp.array([0, 2])].set(group[0]) for part, group in zip(whole, shared)]
    compare(merge(*zip(own, whole)), reference.decode(q, *pool, kv_lens, sm_scale=0.1))


# -- refusals


def refused(match: str, *, page_size: int = 16, head_dim: int = 128, heads: int = 8, width: int = 512,
            dtype: object = jnp.bfloat16, rows: int = 4, max_pages: int = 8, kernel: str = "decode",
            **settings: object) -> None:
    spec = jax.ShapeDtypeStruct
    pages, tables = spec((32, page_size, width), dtype), (spec((rows, max_pages), jnp.int32), spec((rows,), jnp.int32))
    last = dict(decode=(), extend=(spec((rows + 1,), jnp.int32),), shared_prefix=(spec((rows, 3), jnp.int32),))[kernel]
    function = functools.partial(getattr(pallas_tpu, kernel), sm_scale=1.0, **settings)
    with pytest.raises(UnsupportedKernel, match=match):
        jax.eval_shape(function, spec((rows, heads, head_dim), jnp.float32), pages, pages, *tables, *last)


@pytest.mark.parametrize("kernel", ["decode", "extend", "shared_prefix"])
def test_pages_of_one_token_are_refused(kernel: str) -> None:
    refused(rf"{kernel}: page_size=1: expected a multiple of 8", page_size=1, kernel=kernel)


@pytest.mark.parametrize("match, given", [
    ("pages of float16: expected float32 or bfloat16", dict(dtype=jnp.float16)),
    ("8 query heads of 100 on pages of width 400", dict(head_dim=100, width=400)),
    ("7 query heads of 128 on pages of width 512", dict(heads=7)),
    ("sliding_window=0", dict(sliding_window=0)),
    (r"DecodeBlocks\(kv_tokens=24.*whole pages of 16", dict(blocks=DecodeBlocks(24))),
    ("num_splits=1: one core", dict(blocks=DecodeBlocks(32, num_splits=2))),
    ("expected DecodeBlocks or None", dict(blocks=ExtendBlocks(8, 16))),
    ("expected ExtendBlocks or None", dict(blocks=DecodeBlocks(16), kernel="extend")),
    ("q_tokens to be a power of two", dict(blocks=ExtendBlocks(24, 16), kernel="extend")),
    (r"steps of 16384 keys, 2 stages, take [\d,]+ bytes of VMEM of 16,252,928", dict(blocks=DecodeBlocks(16384))),
    (r"a page table of 64 x 4096 and 64 work items take [\d,]+ bytes of SMEM", dict(rows=64, max_pages=4096))])
def test_unserved_arguments_are_refused_by_name(match: str, given: dict[str, object]) -> None:
    refused(match, **given)


def test_race_detection_sees_a_read_before_the_wait(capfd: pytest.CaptureFixture[str]) -> None:
    """What the other tests rely on."""
    def kernel(x: jax.Ref, out: jax.Ref, buffer: jax.Ref, semaphore: jax.Ref) -> None:
        copy = pltpu.make_async_copy(x, buffer, semaphore)
        copy.start()
        out[...] = buffer[...]
        copy.wait()

    x = jnp.zeros((8, 128))
    racy = pl.pallas_call(kernel, out_shape=x, in_specs=[pl.BlockSpec(memory_space=pl.ANY)], interpret=INTERPRET,
                          scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA])
    try:
        racy(x).block_until_ready()
    except jax.errors.JaxRuntimeError as error:         # jax >= 0.11 raises, earlier versions print
        report = str(error)
    else:
        report = ""
    assert "RACE DETECTED" in report + capfd.readouterr().out
