"""Page moves against a NumPy model that carries them out one by one; their programs, memory and failures."""
from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jradix.batch import MoveKind, PageMove
from jradix.config import MAX_PROGRAMS, EngineConfig, KVGroup, StepShapes
from jradix.errors import DeviceError
from jradix.ops.kv_cache import KVCache, kv_page_bytes
from jradix.runner.host_pages import HostPages
from jradix.runner.memory import MemoryPlan, plan_host_pages
from jradix.runner.page_moves import PAGES_PER_CALL, batch_moves
from jradix.runner.runner import ModelRunner
from toy_engine import CPU, counted_compilations, drain, greedy, make_engine, new_runner, toy_decoder, toy_lm

COPY, OUT, IN = MoveKind.COPY, MoveKind.OUT, MoveKind.IN
NUM_PAGES, NUM_HOST_PAGES, PAGE_SIZE = 9, 6, 2
STATM = Path("/proc/self/statm")
TWO_GROUPS = (KVGroup((0, 2)), KVGroup((1,)))


def move(kind: MoveKind, source: Sequence[int] | int, target: Sequence[int] | int) -> PageMove:
    """A move in a model of one KV group."""
    return PageMove(kind, *(np.atleast_2d(np.asarray(ids, np.int32)) for ids in (source, target)))


@functools.cache
def shared_mover(num_groups: int = 1, dtype: str = "float32") -> ModelRunner:
    """A runner with three layers that only moves pages."""
    lm = toy_lm(num_hidden_layers=3)
    config = EngineConfig(page_size=PAGE_SIZE, num_pages=NUM_PAGES, num_host_pages=NUM_HOST_PAGES, max_num_seqs=2,
                          max_model_len=8, prefill_chunk_tokens=8, grammar_bytes=0)
    runner = ModelRunner(toy_decoder(lm.config, lm.weights), lm.config, config, device=CPU, kv_dtype=jnp.dtype(dtype))
    if num_groups == 2:
        runner._settings = dataclasses.replace(runner._settings, groups=TWO_GROUPS)
    return runner


@functools.cache
def hosted_runner() -> ModelRunner:
    """A runner of real steps that also has host pages."""
    return new_runner(toy_lm(num_hidden_layers=1), num_host_pages=8)


def new_mover(num_groups: int = 1, dtype: str = "float32") -> ModelRunner:
    """A shared runner with fresh state; its compiled programs stay between tests."""
    runner = shared_mover(num_groups, dtype)
    runner.reset_state()
    return runner


class Model:
    """What a runner's pages should hold: moves one page at a time, by the rule of `PageMove`."""

    def __init__(self, runner: ModelRunner, seed: int = 0):
        """Fills the runner's pages, those of the host too, and remembers what it wrote."""
        random = np.random.default_rng(seed)
        self.runner, self.group_of_layer = runner, runner._settings.group_of_layer
        self.sides = [[random.standard_normal(a.shape).astype(a.dtype) for a in side] for side in runner.kv]
        runner.kv = KVCache(*(tuple(jax.device_put(a.copy(), CPU) for a in side) for side in self.sides))
        self.host: list[list[np.ndarray]] = [[], []]
        for layer in range(len(self.group_of_layer)):
            for side, stored in zip(self.host, runner.host_pages.layer(layer)):
                stored[...] = random.standard_normal(stored.shape)
                side.append(stored.copy().reshape(len(stored), PAGE_SIZE, -1))

    def apply(self, moves: Sequence[PageMove]) -> None:
        for kind, source, target in moves:
            for i in range(source.shape[1]):
                for device, host in zip(self.sides, self.host):
                    for layer, group in enumerate(self.group_of_layer):
                        read, written = {COPY: (device, device), OUT: (device, host), IN: (host, device)}[kind]
                        written[layer][target[group, i]] = read[layer][source[group, i]]

    def assert_equal(self) -> None:
        for side, expected in zip(self.runner.kv, self.sides):
            for pages, wanted in zip(side, expected):
                assert np.array_equal(np.asarray(jnp.copy(pages))[1:], wanted[1:])
        for layer in range(len(self.group_of_layer)):
            for stored, wanted in zip(self.runner.host_pages.layer(layer), (side[layer] for side in self.host)):
                assert np.array_equal(stored[1:].reshape(wanted[1:].shape), wanted[1:])


def random_moves(random: np.random.Generator, num_groups: int, num_moves: int) -> list[PageMove]:
    """Up to 20 pages each over very few page ids, so that most moves depend on one before."""
    moves = []
    for _ in range(num_moves):
        kind = (COPY, OUT, IN)[random.integers(3)]
        n = random.choice([0, 1, 1, 2, 3, 20])
        source, target = (random.integers(1, limit + 1, (num_groups, n), dtype=np.int32) for limit in (
            NUM_HOST_PAGES if kind is IN else NUM_PAGES, NUM_HOST_PAGES if kind is OUT else NUM_PAGES))
        moves.append(PageMove(kind, source, target))
    return moves


# -- what shares a call

class Pages:
    """Numbers in place of pages; a batch reads all its sources, then writes."""

    def __init__(self) -> None:
        self.device, self.host = list(range(100, 110)), list(range(200, 210))

    def run(self, batch: PageMove) -> None:
        read = self.host if batch.kind is IN else self.device
        written = self.host if batch.kind is OUT else self.device
        values = [read[page] for page in batch.source[0]]
        for page, value in zip(batch.target[0], values):
            written[page] = value


PAIRS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=5)    # source and target


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(MoveKind), PAIRS), max_size=12), st.integers(1, 4))
def test_batches_have_the_effect_of_the_moves_one_by_one(plan: list, limit: int) -> None:
    moves = [move(kind, [s for s, _ in pairs], [t for _, t in pairs]) for kind, pairs in plan]
    expected, found = Pages(), Pages()
    for kind, source, target in moves:
        for s, t in zip(source[0], target[0]):
            expected.run(move(kind, s, t))
    batches = batch_moves(moves, pages_per_call=limit)
    for batch in batches:
        assert 1 <= batch.source.shape[1] <= limit and batch.source.dtype == batch.target.dtype == np.int32
        assert len(set(batch.target[0])) == batch.target.shape[1], "a scatter's order is not defined"
        found.run(batch)
    assert (found.device, found.host) == (expected.device, expected.host)
    assert sum(b.source.shape[1] for b in batches) == sum(m.source.shape[1] for m in moves)


@pytest.mark.parametrize("moves, kinds", [
    ([], []),
    ([move(OUT, [], [])], []),
    ([move(COPY, 1, 2), move(COPY, 3, 4)], [COPY]),
    ([move(COPY, 1, 2), move(COPY, 2, 3)], [COPY, COPY]),       # the second reads what the first wrote
    ([move(COPY, 1, 2), move(COPY, 3, 2)], [COPY, COPY]),       # both write page 2: the last one counts
    ([move(COPY, 1, 2), move(COPY, 3, 1)], [COPY]),             # page 1 is read before it is written
    ([move(OUT, 1, 1), move(COPY, 5, 1), move(OUT, 2, 2), move(COPY, 5, 2)], [OUT, COPY]),   # evict and reuse, twice
    ([move(COPY, 5, 1), move(OUT, 1, 1)], [COPY, OUT]),
    ([move(OUT, 1, 1), move(IN, 1, 2), move(OUT, 2, 3)], [OUT, IN, OUT]),
    ([move(OUT, 1, 1), move(IN, 3, 1), move(OUT, 2, 2), move(IN, 4, 2)], [OUT, IN]),
    ([move(OUT, 1, 1), move(IN, 3, 1), move(OUT, 2, 3)], [OUT, IN, OUT]),    # the last one writes what IN reads
    ([move(OUT, 1, 1), move(OUT, 2, 1)], [OUT, OUT]),
    ([move(OUT, range(1, 10), range(1, 10))], [OUT, OUT]),      # nine pages, eight to a call
])
def test_batches_of_neighbours_are_as_few_as_their_dependencies_allow(moves: list, kinds: list) -> None:
    assert [batch.kind for batch in batch_moves(moves)] == kinds


def test_batches_in_two_groups_keep_each_groups_own_page_ids_apart() -> None:
    """Page 2 of one group is not page 2 of the other."""
    first, other = (PageMove(COPY, np.array([[s], [t]], np.int32), np.array([[t], [s]], np.int32)) for s, t in (
        (1, 2), (3, 4)))
    assert [b.source.tolist() for b in batch_moves([first, other])] == [[[1, 3], [2, 4]]]


# -- on the device

@pytest.mark.parametrize("num_groups, dtype", [(1, "float32"), (2, "float32"), (2, "bfloat16")])
@pytest.mark.parametrize("seed", range(4))
def test_random_moves_leave_what_one_by_one_leaves(num_groups: int, dtype: str, seed: int) -> None:
    """N03: and no other page changes."""
    runner = new_mover(num_groups, dtype)
    model, random = Model(runner, seed), np.random.default_rng(seed)
    for _ in range(6):
        moves = random_moves(random, num_groups, random.integers(0, 12))
        runner.move_pages(moves)
        model.apply(moves)
        if random.integers(2):
            model.assert_equal()
    model.assert_equal()
    assert runner.is_intact


def test_moves_with_poison_in_the_scratch_page_and_in_free_ones_move_only_whole_pages() -> None:
    runner = new_mover()
    model = Model(runner)
    for side in model.sides:
        for pages in side:
            pages[[0, 8, 9]] = np.nan
    runner.kv = KVCache(*(tuple(jax.device_put(a.copy(), CPU) for a in side) for side in model.sides))
    moves = [move(OUT, 1, 1), move(COPY, 2, 1), move(IN, 1, 2), move(COPY, [3, 4], [5, 6])]
    runner.move_pages(moves)
    model.apply(moves)
    for side, expected in zip(runner.kv, model.sides):
        for pages, wanted in zip(side, expected):
            assert np.array_equal(np.asarray(jnp.copy(pages))[1:], wanted[1:], equal_nan=True)
            assert not np.isnan(np.asarray(jnp.copy(pages))[1:8]).any()


def test_moves_write_the_pool_in_place() -> None:
    """Donation works, and no program has a temporary of the size of the pool: the time follows the pages moved."""
    runner = new_runner(toy_lm(num_hidden_layers=1), num_pages=4096, num_host_pages=32)
    places = [a.unsafe_buffer_pointer() for a in (*runner.kv.k, *runner.kv.v)]
    for moves in ([move(COPY, 1, 2)], [move(OUT, range(1, 20), range(1, 20))], [move(IN, 3, 5)],
                  [move(COPY, range(1, 10), range(20, 29)), move(OUT, 20, 1), move(IN, 1, 2)]):
        runner.move_pages(moves)
        assert [a.unsafe_buffer_pointer() for a in (*runner.kv.k, *runner.kv.v)] == places
    pool = sum(a.nbytes for a in (*runner.kv.k, *runner.kv.v))
    ids, count = np.zeros((1, PAGES_PER_CALL), np.int32), np.int32(1)
    contents = runner.host_pages.read(ids, PAGES_PER_CALL)
    arguments = {"copy pages": (ids, ids, count), "gather pages": (ids,), "scatter pages": (ids, contents, count)}
    for name, given in arguments.items():
        used = runner._programs[name,].lower(runner.kv, *given).compile().memory_analysis()
        assert used.temp_size_in_bytes < pool / 10, name
        assert used.alias_size_in_bytes == (0 if name == "gather pages" else pool), name


def test_move_leaves_no_reference_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step after an OUT still writes in place, although the copy is pending."""
    runner = hosted_runner()
    engine = make_engine(runner)
    monkeypatch.setattr(HostPages, "fetch_ready", lambda self: None)
    runner.move_pages([move(OUT, range(200, 208), range(1, 9))])
    places = [a.unsafe_buffer_pointer() for a in (*runner.kv.k, *runner.kv.v)]
    engine.add_request([5, 6, 7, 8, 9], greedy(3))
    drain(engine)
    assert runner.host_pages.pending_bytes > 0
    assert [a.unsafe_buffer_pointer() for a in (*runner.kv.k, *runner.kv.v)] == places


def test_moves_under_an_engine_do_not_disturb_its_tokens() -> None:
    """Out, poison, in again: what comes back is what the next step reads."""
    runner = hosted_runner()
    engine = make_engine(runner)
    prompt = list(range(3, 20))
    engine.add_request(prompt, greedy(4))
    drain(engine)
    pages = sorted(int(p) for node in engine.cache.tree.nodes() for p in node.pages[0])
    host = list(range(1, len(pages) + 1))
    runner.move_pages([move(OUT, pages, host)])
    runner.kv = jax.tree.map(lambda a: jax.device_put(np.full(a.shape, np.nan, a.dtype), CPU), runner.kv)
    runner.move_pages([move(IN, host, pages)])
    engine.add_request(prompt, greedy(4))
    out, = drain(engine).values()
    assert out.num_cached_tokens > 0
    toy_lm(num_hidden_layers=1).assert_greedy(prompt, out.outputs[0].token_ids, 4)


# -- buffers

def test_staging_arrays_are_fresh_and_no_views_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU a program reads its NumPy arguments in place: the store may change right after the dispatch."""
    runner = new_mover()
    model = Model(runner)
    runner.move_pages([move(IN, 1, 1)])
    real, seen = runner._programs["scatter pages",], []

    def scatter(kv: KVCache, *arguments: object) -> KVCache:
        seen.append([a for a in jax.tree.leaves(arguments) if isinstance(a, np.ndarray)])
        return real(kv, *arguments)

    monkeypatch.setitem(runner._programs, ("scatter pages",), scatter)
    moves = [move(IN, [1, 2], [3, 4]), move(IN, 5, 3)]
    runner.move_pages(moves)
    stored = [array for layer in range(3) for array in runner.host_pages.layer(layer)]
    for array in stored:
        array.fill(np.nan)
    model.apply([move(IN, 1, 1), *moves])
    for side, expected in zip(runner.kv, model.sides):
        assert all(np.array_equal(np.asarray(jnp.copy(a))[1:], b[1:]) for a, b in zip(side, expected))
    assert len(seen) == 2
    assert not any(np.shares_memory(a, b) for a in seen[0] for b in (*seen[1], *stored))


class SlowArray:
    """A device array whose copy to the host has not arrived; whoever takes its content has waited for it."""

    def __init__(self, value: float, waited: list[float]):
        self.value, self.waited, self.has_arrived = value, waited, False
        self.nbytes = 4 * PAGE_SIZE * 4 * 2

    def copy_to_host_async(self) -> None:
        pass

    def is_ready(self) -> bool:
        return self.has_arrived

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        self.waited.append(self.value)
        return np.full((4, 2, PAGE_SIZE, 4), self.value, np.float32)


def small_store(max_pending: int) -> HostPages:
    """One layer, room for `max_pending` copies of `SlowArray`s."""
    return HostPages(num_pages=9, groups=(KVGroup((0,)),), page_size=PAGE_SIZE, num_kv_heads=2, head_dim=2,
                     dtype=np.dtype(np.float32), max_pending_bytes=max_pending * SlowArray(0, []).nbytes)


def ids(*pages: int) -> np.ndarray:
    return np.array([pages], np.int32)


def test_pending_copies_are_bounded_and_the_oldest_goes_first() -> None:
    store, waited = small_store(3), []
    for i in range(1, 8):
        store.defer((SlowArray(i, waited),), ids(i))
        assert store.pending_bytes <= 3 * SlowArray(0, []).nbytes
        assert waited == list(range(1, i - 2))
    store.fetch_all()
    assert store.pending_bytes == 0 and waited == list(range(1, 8))
    assert store.layer(0)[0][1:8, 0, 0, 0].tolist() == list(range(1, 8))


def test_pending_copy_larger_than_the_bound_is_kept_alone() -> None:
    store, waited = small_store(0), []
    store.defer((SlowArray(1, waited),), ids(1))
    assert waited == []
    store.defer((SlowArray(2, waited),), ids(2))
    assert waited == [1]


def test_pending_copies_that_have_not_arrived_are_not_waited_for() -> None:
    store, waited = small_store(9), []
    copies = [SlowArray(i, waited) for i in range(1, 4)]
    for i, copy in enumerate(copies, 1):
        store.defer((copy,), ids(i))
    store.fetch_ready()
    assert waited == []
    copies[0].has_arrived = copies[1].has_arrived = True
    store.fetch_ready()
    assert waited == [1], "at most one at a time"
    store.fetch_ready()
    store.fetch_ready()
    assert waited == [1, 2]


def test_reading_host_pages_waits_for_their_pending_copies_and_no_later_ones() -> None:
    store, waited = small_store(9), []
    for value, page in ((1, 5), (2, 6), (3, 5), (4, 7)):
        store.defer((SlowArray(value, waited),), ids(page))
    store.read(ids(1, 2), 4)
    assert waited == []
    content, = store.read(ids(6, 5), 4)
    assert waited == [1, 2, 3]
    assert content.shape == (4, 2, PAGE_SIZE, 4) and content[:2, 0, 0, 0].tolist() == [2, 3]


def test_pending_copies_of_a_runner_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In live device arrays, not only in the store's books."""
    runner = new_mover()
    batch = PAGES_PER_CALL * kv_page_bytes(num_layers=3, page_size=PAGE_SIZE, kv_width=16, dtype=jnp.float32)
    monkeypatch.setattr(HostPages, "fetch_ready", lambda self: None)
    runner.host_pages._max_pending_bytes = 4 * batch

    def live_bytes() -> int:
        """Several arrays may share a buffer."""
        return sum({a.unsafe_buffer_pointer(): a.nbytes for a in jax.live_arrays()}.values())

    before = live_bytes()
    for _ in range(5):
        runner.move_pages([move(OUT, range(1, 7), range(1, 7))] * 3)
        assert runner.host_pages.pending_bytes <= 4 * batch
        assert live_bytes() <= before + 4 * batch
    assert live_bytes() == before + 4 * batch, "the bound was never reached"


@pytest.mark.skipif(not STATM.exists(), reason="needs /proc")
def test_host_pages_that_were_never_written_take_no_memory() -> None:
    def resident() -> int:
        return int(STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    store = HostPages(num_pages=2**12, groups=(KVGroup(tuple(range(8))),), page_size=16, num_kv_heads=4, head_dim=64,
                      dtype=np.dtype(np.float32))
    assert sum(side.nbytes for layer in range(8) for side in store.layer(layer)) > 2**30
    assert resident() - before < 2**25


# -- programs

@pytest.mark.parametrize("num_host_pages, names", [(0, {"copy pages"}),
                                                   (8, {"copy pages", "gather pages", "scatter pages"})])
def test_warmup_compiles_the_moves_that_can_happen_and_none_compiles_later(
        num_host_pages: int, names: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
        ) -> None:
    runner = new_runner(toy_lm(num_hidden_layers=1), num_host_pages=num_host_pages, grammar_bytes=0)
    monkeypatch.setattr(runner, "dispatch", lambda *args, **kwargs: None)    # the steps are another test's
    runner.warmup()
    assert {key for key in runner._programs} == {(name,) for name in names} and runner.num_compiled == len(names)
    assert not any(np.asarray(jnp.copy(a)).any() for a in (*runner.kv.k, *runner.kv.v))
    with counted_compilations() as compiled:
        for n in (1, 3, 8):
            few = list(range(1, n + 1))
            runner.move_pages([move(COPY, few, [p + 100 for p in few])])
            if num_host_pages:
                runner.move_pages([move(OUT, few, few), move(IN, few, few)])
    assert compiled == [] and not caplog.records
    assert {program._cache_size() for program in runner._programs.values()} == {1}


@pytest.mark.parametrize("max_num_seqs", [1, 32, 256])
@pytest.mark.parametrize("chunk_tokens", [8, 2048, 8192])
def test_host_pages_add_two_programs_within_the_limit(max_num_seqs: int, chunk_tokens: int) -> None:
    sizes = dict(max_num_seqs=max_num_seqs, prefill_chunk_tokens=chunk_tokens, grammar_bytes=0)
    without, shapes = (StepShapes.for_engine(EngineConfig(**sizes, num_host_pages=n)) for n in (0, 1))
    assert shapes.num_programs == len(shapes.all()) + len(shapes.row_buckets) + 5 <= MAX_PROGRAMS
    assert without.num_programs == len(without.all()) + len(without.row_buckets) + 3 <= MAX_PROGRAMS


# -- refusals and failures

@pytest.mark.parametrize("bad, message", [
    (move(COPY, 0, 1), "COPY: source pages 0 to 0, expected 1 to 9, the pages of the device"),
    (move(COPY, 1, NUM_PAGES + 1), "target pages 10 to 10, expected 1 to 9"),
    (move(COPY, [1, -1], [2, 3]), "source pages -1 to 1"),
    (move(OUT, 1, NUM_HOST_PAGES + 1), "target pages 7 to 7, expected 1 to 6, the pages of the host"),
    (move(IN, NUM_HOST_PAGES + 1, 1), "source pages 7 to 7, expected 1 to 6, the pages of the host"),
    (move(COPY, [1, 2], [3]), r"pages \(1, 2\) to \(1, 1\): expected two arrays \[1, n\]"),
    (PageMove(COPY, np.ones((2, 1), np.int32), np.ones((2, 1), np.int32)), r"expected two arrays \[1, n\]"),
])
def test_move_of_a_page_that_does_not_exist_is_refused_and_nothing_moved(bad: PageMove, message: str) -> None:
    """N03: never clamped to the last page."""
    runner = new_mover()
    model = Model(runner)
    with pytest.raises(ValueError, match=message):
        runner.move_pages([move(COPY, 1, 2), move(OUT, 1, 1), bad])
    model.assert_equal()
    assert runner.is_intact


def test_move_to_the_host_without_host_pages_is_refused() -> None:
    runner = new_runner(num_pages=16)
    with pytest.raises(ValueError, match="OUT: target pages 1 to 1, expected 1 to 0, the pages of the host"):
        runner.move_pages([move(OUT, 1, 1)])
    assert runner.is_intact and runner.host_pages is None


class Failing:
    """A program that consumes the arrays it is given, then raises."""

    def __init__(self, program: Callable):
        self.program = program

    def __call__(self, *arguments: object) -> None:
        jax.block_until_ready(self.program(*arguments))
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")


@pytest.mark.parametrize("program", ["copy pages", "gather pages", "scatter pages"])
def test_failure_of_a_move_leaves_the_runner_not_intact_until_reset(program: str, monkeypatch: pytest.MonkeyPatch
                                                                    ) -> None:
    """F04: also when nothing was donated, because the moves after it are missing."""
    runner = new_mover()
    moves = [move(COPY, 1, 2), move(OUT, 2, 3), move(IN, 3, 4)]
    runner.move_pages(moves)
    assert runner.is_intact
    with monkeypatch.context() as patch:
        patch.setitem(runner._programs, (program,), Failing(runner._programs[program,]))
        with pytest.raises(jax.errors.JaxRuntimeError, match="device is lost"):
            runner.move_pages(moves)
        assert not runner.is_intact
    runner.reset_state()
    assert runner.is_intact and runner.host_pages.pending_bytes == 0
    model = Model(runner)
    runner.move_pages(moves)
    model.apply(moves)
    model.assert_equal()


def test_failure_of_a_pending_copy_is_noticed_when_it_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program failed after its dispatch; the page that the tree counts on is not in the store."""
    runner = new_mover()
    monkeypatch.setattr(HostPages, "fetch_ready", lambda self: None)
    runner.move_pages([move(OUT, 1, 1)])

    def fail(_: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr("jradix.runner.host_pages.np.asarray", fail)
        with pytest.raises(jax.errors.JaxRuntimeError):
            runner.host_pages.fetch_all()
    assert not runner.is_intact
    runner.reset_state()
    assert runner.is_intact


def test_reset_drops_pending_copies_and_close_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = new_runner(toy_lm(num_hidden_layers=1), num_pages=16, num_host_pages=4)
    monkeypatch.setattr(HostPages, "fetch_ready", lambda self: None)
    runner.move_pages([move(OUT, 1, 1)])
    old = runner.host_pages
    assert old.pending_bytes > 0
    runner.reset_state()
    assert runner.host_pages is not old and runner.host_pages.pending_bytes == 0
    runner.close()
    runner.close()
    assert runner.host_pages is None and not runner.is_intact


def test_layer_of_host_pages_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer=1: expected one of \[0\]"):
        small_store(1).layer(1)


# -- sizing

def plan(device: str, available: int) -> MemoryPlan:
    return MemoryPlan(device, available, weight_bytes=1000, step_bytes=200, kv_bytes=3000, num_pages=2,
                      page_size=PAGE_SIZE)


PAGE_BYTES = kv_page_bytes(num_layers=2, page_size=PAGE_SIZE, kv_width=16, dtype=jnp.float32)


def host_pages_for(num_bytes: int, device: str = "cpu", available: int = 10**6) -> int:
    return plan_host_pages(toy_lm().config, plan(device, available), host_cache_bytes=num_bytes,
                           kv_dtype=jnp.dtype(jnp.float32))


def test_host_cache_bytes_give_as_many_pages_as_fit() -> None:
    assert [host_pages_for(n) for n in (PAGE_BYTES, 2 * PAGE_BYTES - 1, 10 * PAGE_BYTES)] == [1, 1, 10]
    assert host_pages_for(5 * PAGE_BYTES, available=4200 + 5 * PAGE_BYTES) == 5
    assert host_pages_for(5 * PAGE_BYTES, device="gpu", available=0) == 5, "a GPU's memory is not the machine's"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_host_cache_bytes_beyond_the_machines_memory_are_a_device_error_with_both_numbers(
        device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jradix.runner.memory.machine_free_bytes", lambda: 3 * 2**20)
    with pytest.raises(DeviceError, match=r"host_cache_bytes=4194304 \(4 MiB\), but .* 3145728 bytes \(3 MiB\) "
                                          "available; give at most that, or free memory"):
        host_pages_for(4 * 2**20, device, available=3 * 2**20 + 4200)


def test_host_cache_bytes_below_one_page_are_refused() -> None:
    with pytest.raises(ValueError, match=f"host_cache_bytes=7: one page of 2 tokens takes {PAGE_BYTES} bytes"):
        host_pages_for(7)


@pytest.mark.parametrize("num_host_pages", [-1])
def test_config_with_a_negative_number_of_host_pages_is_refused(num_host_pages: int) -> None:
    with pytest.raises(ValueError, match="num_host_pages=-1"):
        EngineConfig(num_host_pages=num_host_pages)
