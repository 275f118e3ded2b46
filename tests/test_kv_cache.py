"""Writes into KV pages: only the named slots change, a slot outside the array changes none."""
from __future__ import annotations

import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.config import KVGroup
from jradix.ops import memory_native
from jradix.ops.kv_cache import KVCache, kv_page_bytes, make_kv_cache, write_kv
from jradix.runner.kv_store import PageBlock, fill_pages
from jradix.runner.page_moves import make_copy_pages, make_gather_pages, make_scatter_pages
from toy_engine import CPU, drain, greedy, make_engine, toy_runner

PAGES = np.arange(8 * 4 * 2, dtype=np.float32).reshape(8, 4, 2) + 1


def write(values: np.ndarray, slots: list[int], pages: np.ndarray = PAGES) -> np.ndarray:
    """Pages of keys after a write of `values`; those of values are written with the negated ones, and checked."""
    rows = jnp.asarray(values, jnp.float32)
    keys, negated = jax.jit(write_kv)(jnp.asarray(pages), -jnp.asarray(pages), rows, -rows, np.array(slots, np.int32))
    assert np.array_equal(keys, -negated)
    return np.asarray(keys)


def test_write_kv_named_slots_change_and_no_other() -> None:
    out = write([[-1, -2], [-3, -4]], [5, 30])
    expected = PAGES.copy()
    expected[1, 1], expected[7, 2] = (-1, -2), (-3, -4)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("slot", [8 * 4, 8 * 4 + 3, 10**6, 2**31 - 1, -1, -4, -32, -2**31])
def test_write_kv_slot_outside_the_array_is_dropped(slot: int) -> None:
    """N03: page 8 of 8, and page -1: neither clamped to the last page nor wrapped to it."""
    assert np.array_equal(write([[-1, -2], [-3, -4]], [slot, 1])[1:], PAGES[1:])


def test_write_kv_casts_to_the_pages_type() -> None:
    empty, row = jnp.zeros((1, 2, 1), jnp.bfloat16), jnp.asarray([[1.00390625]])
    for pages in write_kv(empty, empty, row, row, jnp.asarray([1])):
        assert pages.dtype == jnp.bfloat16 and pages[0, 1, 0] == 1.0


def test_write_kv_width_without_a_kernel_is_written_by_xla_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    empty, row = jnp.zeros((2, 2, 40), jnp.bfloat16), jnp.ones((1, 40))
    with caplog.at_level("INFO", logger="jradix"):
        k_pages, v_pages = write_kv(empty, empty, row, 2 * row, jnp.asarray([3]), implementation="mosaic_gpu")
    assert k_pages[1, 1].sum() == 40 and v_pages[1, 1].sum() == 80 and k_pages.sum() == 40
    assert "KV write: by XLA" in caplog.text and "40" in caplog.text


@pytest.mark.parametrize("field, value", [("num_pages", 257), ("max_num_seqs", 9), ("max_model_len", 132),
                                          ("prefill_chunk_tokens", 72), ("page_size", 8)])
def test_engine_larger_than_its_runner_is_refused(field: str, value: int) -> None:
    """N03: an allocator that is told of more pages than the arrays have never starts."""
    with pytest.raises(ValueError, match=field if field != "max_model_len" else "max_pages_per_seq"):
        make_engine(toy_runner(), **{field: value})


def test_make_kv_cache_has_the_scratch_page_and_the_stated_bytes() -> None:
    kv = make_kv_cache(num_layers=3, num_pages=7, page_size=4, kv_width=16, dtype=jnp.float32, device=CPU)
    assert {a.shape for a in (*kv.k, *kv.v)} == {(8, 4, 16)} and len(kv.k) == len(kv.v) == 3
    page = kv_page_bytes(num_layers=3, page_size=4, kv_width=16, dtype=jnp.float32)
    assert sum(a.nbytes for a in (*kv.k, *kv.v)) == 8 * page
    assert all(a.committed for a in (*kv.k, *kv.v))


NOT_NATIVE = memory_native.why_not(jnp.float32)
needs_native = pytest.mark.skipif(NOT_NATIVE is not None, reason=str(NOT_NATIVE))
of_each_type = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])


@needs_native
@of_each_type
def test_zeros_are_zeros_also_in_memory_that_was_used(dtype: jnp.dtype) -> None:
    for shape in ((3,), (1000,), (5, 4097), (64, 16, 256), (2048, 16, 256)):
        for _ in range(3):
            found = memory_native.zeros(shape, dtype, CPU)
            assert found.shape == shape and found.dtype == dtype and found.committed
            assert not np.asarray(jnp.copy(found)).any()
            jax.jit(lambda x: x + 1, donate_argnums=0)(found).block_until_ready().delete()
    assert "expected one of float32" in memory_native.why_not(jnp.int32)


@needs_native
@of_each_type
def test_pool_on_a_cpu_takes_memory_as_it_is_written(dtype: jnp.dtype) -> None:
    """Rows of tokens, copies and moves of pages change what they name and touch no other memory. XLA's own writes of
    bfloat16 rewrite the whole array (jax 0.10)."""
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    layers = 0, 1
    sizes = dict(num_layers=len(layers), num_pages=2**13, page_size=16, kv_width=256, dtype=dtype, device=CPU)
    write = jax.jit(lambda kv, rows, slots: KVCache(*zip(*(
        write_kv(k, v, rows, -rows, slots) for k, v in zip(kv.k, kv.v)))), donate_argnums=0)
    groups = KVGroup(layers),
    copy = jax.jit(make_copy_pages([0] * len(layers)), donate_argnums=0)
    gather, scatter = jax.jit(make_gather_pages(groups)), jax.jit(make_scatter_pages(groups), donate_argnums=0)

    def run(kv: KVCache) -> KVCache:
        kv = write(kv, jnp.arange(1, 3)[:, None] * jnp.ones((2, 256)), jnp.asarray([3 * 16 + 1, 2**30]))
        kv = copy(kv, jnp.asarray([[3]]), jnp.asarray([[4]]), jnp.int32(1))
        kv = scatter(kv, jnp.asarray([[5, 6]]), gather(kv, jnp.asarray([[4, 3]])), jnp.int32(1))
        for layer in layers:
            block = PageBlock(layer, False, np.array([7, 2**31 - 1], np.int32), np.full((2, 16, 2, 128), 9, dtype))
            kv = fill_pages(kv, block)
        return jax.block_until_ready(kv)

    run(make_kv_cache(**{**sizes, "num_pages": 8}))     # compiles what does not depend on the pool's size
    before = resident_bytes()
    kv = jax.block_until_ready(make_kv_cache(**sizes))
    num_bytes, where = sum(array.nbytes for array in (*kv.k, *kv.v)), kv.k[0].unsafe_buffer_pointer()
    assert num_bytes >= 2**28 and resident_bytes() - before < num_bytes / 8
    kv = run(kv)
    assert kv.k[0].unsafe_buffer_pointer() == where
    assert resident_bytes() - before < num_bytes / 3
    expected = np.zeros((8, 16, 256), np.float32)
    expected[3:6, 1] = 1
    for array in (-kv.v[0], -kv.v[1]):
        assert np.array_equal(array[:8], expected)
    expected[7] = 9
    for array in kv.k:
        assert np.array_equal(array[:8], expected)


def snapshot(kv: KVCache) -> list[np.ndarray]:
    return [np.array(jnp.copy(a)) for a in (*kv.k, *kv.v)]


@pytest.mark.parametrize("num_tokens, num_output", [(3, 1), (3, 5), (40, 3)])
def test_step_padding_writes_only_the_scratch_page_and_own_slots(num_tokens: int, num_output: int) -> None:
    """N04: a batch of one padded to 8 rows and 16 or more tokens; another request's pages keep every bit.

    Covers a whole prompt, decoding, and a prompt in chunks.
    """
    runner = toy_runner()
    engine = make_engine(runner, prefill_chunk_tokens=16)
    engine.add_request([9, 8, 7, 6, 5], greedy(4))
    drain(engine)
    others = [int(p) for node in engine.cache.tree.nodes() for p in node.pages[0]]
    assert others
    runner.kv = jax.tree.map(lambda a: jax.device_put(np.full(a.shape, 7, np.float32), CPU), runner.kv)
    before = snapshot(runner.kv)
    request_id = engine.add_request(list(range(3, 3 + num_tokens)), greedy(num_output))
    own = np.zeros(before[0].shape[:2], bool)
    own[0] = True
    while engine.has_unfinished:
        outputs = engine.step()
        for request in engine.scheduler.requests():     # while it runs, its page table names what was written so far
            for position in range(request.num_computed):
                own[request.lease.page_table[0, position // 4], position % 4] = True
    assert [out.request_id for out in outputs] == [request_id]
    assert own[1:].sum() == num_tokens + num_output - 1
    for old, new in zip(before, snapshot(runner.kv)):
        assert np.array_equal(old[others], new[others])
        assert not ((old != new).any(axis=2) & ~own).any()
