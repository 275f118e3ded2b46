"""The scheduler against a simulated device: any schedule must give the tokens of a plain loop over one request.

The device keeps KV as a dictionary of slots and reads nothing but the plan's page moves and the arrays of the
`StepBatch`. A slot remembers the whole history of its token, as real KV does. Moves are carried out in order, then what
stands in free pages is lost, then the step writes. Each planned row must find exactly its own history in its page
table, and each node of the tree its own in its pages, on the device or on the host: wrong page tables, pages freed too
early, moves left out and wrong commits all show. What a request finds in the cache is held against a record of all
that was handed in.
"""
from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jradix.batch import MoveKind, PageMove, StepLayout
from jradix.cache.node import Namespace, Tier
from jradix.cache.pages import SCRATCH_PAGE, PagePool
from jradix.cache.prefix_cache import Lease, PrefixCache
from jradix.config import EngineConfig, StepShapes
from jradix.errors import RequestError
from jradix.sampling_params import SamplingParams
from jradix.sched.plan import StepPlan, build_step_batch
from jradix.sched.policy import choose, shares_pending_prefix
from jradix.sched.request import Request, RequestState
from jradix.sched.scheduler import Scheduler

VOCAB = 11
EOS = 0


# -- the model: the next token is a function of the whole history


def extend_history(history: int, token: int) -> int:
    return hash((history, token))


def histories(tokens: Sequence[int]) -> list[int]:
    """The history after each token."""
    found, history = [], 7
    for token in tokens:
        history = extend_history(history, int(token))
        found.append(history)
    return found


def next_token(history: int) -> int:
    return (history >> 5) % VOCAB


def plain_loop(request: Request) -> list[int]:
    """Output tokens of one request run alone in unlimited memory."""
    tokens = request.tokens[:request.num_prompt].tolist()
    output: list[int] = []
    while len(output) < request.max_output:
        output.append(next_token(histories([*tokens, *output])[-1]))
        if output[-1] in request.stop_ids:
            break
    return output


# -- the device


class Device:
    """Runs packed steps in the order of their dispatch.

    `kv[g]` maps slot (page * page_size + offset) to a history, `host_kv[g]` the same for pages of the host.
    """

    def __init__(self, config: EngineConfig, cache: PrefixCache):
        self.config = config
        self.num_groups = len(cache.pools)
        self.shapes = StepShapes.for_engine(config)
        self.cache = cache
        self.kv: list[dict[int, int]] = [{} for _ in cache.pools]
        self.host_kv: list[dict[int, int]] = [{} for _ in cache.pools]
        self.last_token = [-1] * (config.max_num_seqs + 1)
        self.expected: dict[int, list[int]] = {}      # request id -> history after each token of the right answer
        self.num_poison = 0
        self.num_moved_pages: Counter[MoveKind] = Counter()

    def dispatch(self, plan: StepPlan) -> np.ndarray:
        """Runs a step from its moves and packed arrays; the rows are only used to know what is right."""
        self.move(plan.page_moves)
        self._poison(self.kv, self.cache.pools)
        self._poison(self.host_kv, self.cache.host_pools)
        shape = self.shapes.fit(len(plan.rows), plan.num_tokens, plan.num_decode)
        layout = StepLayout(shape, num_groups=self.num_groups, max_pages=self.config.max_pages_per_seq,
                            page_size=self.config.page_size, num_logit_rows=-(-shape.num_tokens // 32) * 32,
                            vocab_size=32)
        packed, needs = build_step_batch(plan, layout, spare_slot=self.config.max_num_seqs)
        chosen = packed if needs.sampling else layout.allocate()
        batch, params = layout.step_batch(packed.ints), layout.row_params(chosen.row_ints, chosen.row_floats)
        assert batch.num_decode[0] == plan.num_decode
        drawn = np.full((plan.num_steps, shape.num_rows), -1, np.int32)
        inputs = [batch.tokens[batch.cu_q_lens[i]:batch.cu_q_lens[i + 1]].tolist() for i in range(shape.num_rows)]
        for i, tokens in enumerate(inputs):
            if batch.token_src[i] >= 0:
                assert len(tokens) == 1 and i < plan.num_decode
                inputs[i] = [self.last_token[batch.token_src[i]]]
        is_done = [not sampled for sampled in batch.is_sampled]
        for step in range(plan.num_steps):
            self._write(batch.page_table, batch.kv_lens, inputs, step,
                        [done and plan.num_steps > 1 for done in is_done])
            for i, row in enumerate(plan.rows):
                if step and is_done[i]:
                    continue
                kv_len = int(batch.kv_lens[i]) + step
                self._check(row.request, batch.page_table[:, i], kv_len, row.start)
                if is_done[i]:
                    continue
                token = next_token(self._read(0, batch.page_table[0, i], kv_len - 1))
                drawn[step, i] = self.last_token[batch.row_slots[i]] = token
                inputs[i] = [token]
                if plan.num_steps > 1:
                    is_done[i] = token in params.stop_ids[i] or step + 1 >= params.tokens_left[i]
        return drawn

    def move(self, moves: Sequence[PageMove]) -> None:
        """Copies pages, one after the other; what a page does not hold its copy does not hold."""
        page_size = self.config.page_size
        for kind, sources, targets in moves:
            assert sources.shape == targets.shape and len(sources) == self.num_groups and sources.size
            self.num_moved_pages[kind] += sources.shape[1]
            for g in range(self.num_groups):
                read = (self.host_kv if kind is MoveKind.IN else self.kv)[g]
                written = (self.host_kv if kind is MoveKind.OUT else self.kv)[g]
                for source, target in zip(sources[g].tolist(), targets[g].tolist()):
                    assert source != SCRATCH_PAGE and target != SCRATCH_PAGE
                    for offset in range(page_size):
                        content = read.get(source * page_size + offset)
                        written.pop(target * page_size + offset, None)
                        if content is not None:
                            written[target * page_size + offset] = content

    def check_tree(self) -> None:
        """Every cached page that is here holds the histories its tokens say."""
        page_size, tree = self.config.page_size, self.cache.tree
        for node in tree.nodes():
            right = histories(tree.tokens_of(node).tolist())[-(len(node.key) // 4):]
            for g in range(self.num_groups):
                kv = self.kv[g] if node.tier is Tier.DEVICE else self.host_kv[g]
                pages = node.pages[g].tolist()
                found = [kv.get(pages[i // page_size] * page_size + i % page_size) for i in range(len(right))]
                assert found == right, f"a {node.tier.name} node of group {g} holds other KV than its tokens say"

    def _poison(self, kv: list[dict[int, int]], pools: Sequence[PagePool]) -> None:
        """A free page may be written at any time: nobody reads it any more."""
        for g, pool in enumerate(pools):
            for page in pool.free_pages().tolist():
                for offset in range(self.config.page_size):
                    kv[g].pop(page * self.config.page_size + offset, None)

    def expect(self, request: Request) -> None:
        tokens = [*request.tokens[:request.num_prompt].tolist(), *plain_loop(request)]
        self.expected[request.request_id] = histories(tokens)

    def _write(self, page_table: np.ndarray, kv_lens: np.ndarray, inputs: list[list[int]], step: int,
               is_silent: list[bool]) -> None:
        """Writes all rows; a token sees the others of its step, in whatever row they are."""
        todo = [(i, int(kv_lens[i]) + step - len(tokens) + k, token) for i, tokens in enumerate(inputs)
                for k, token in enumerate(tokens) if not is_silent[i]]
        for i, position, token in sorted(todo, key=lambda entry: entry[1]):
            for g in range(self.num_groups):
                history = self._read(g, page_table[g, i], position - 1) if position else 7
                self.kv[g][self._slot(page_table[g, i], position)] = extend_history(history, token)

    def _read(self, g: int, pages: np.ndarray, position: int) -> int:
        slot = self._slot(pages, position)
        if slot not in self.kv[g]:
            self.num_poison += 1
            return -1000 - self.num_poison     # never written: as wrong as can be, and different each time
        return self.kv[g][slot]

    def _slot(self, pages: np.ndarray, position: int) -> int:
        page = int(pages[position // self.config.page_size])
        assert page != SCRATCH_PAGE, f"position {position} lies beyond the page table"
        return page * self.config.page_size + position % self.config.page_size

    def _check(self, request: Request, page_table: np.ndarray, kv_len: int, start: int) -> None:
        expected = self.expected[request.request_id]
        if start >= len(expected):
            return      # planned ahead of a stop that nobody knew of; its result is dropped
        for g in range(self.num_groups):
            found = [self._read(g, page_table[g], position) for position in range(min(kv_len, len(expected)))]
            assert found == expected[:kv_len], f"request {request.request_id}, group {g}: wrong KV in {kv_len}"


# -- what the cache must know


class WatchedCache(PrefixCache):
    """A cache that keeps a record of what was handed in, by histories, and holds each look-up against it.

    What is committed in whole pages, or released, stays; tokens in the last page of a lease can be had while it lives.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept: dict[Namespace, set[int]] = {}
        self.tails: dict[Lease, list[int]] = {}
        self.num_exact = 0

    def longest_prefix(self, tokens: np.ndarray, namespace: Namespace | None) -> int:
        """Leading tokens whose KV was handed in and not evicted, as far as nothing was evicted yet."""
        if namespace is None or not self.enabled:
            return 0
        known = self.kept.get(namespace, set()).union(
            *(tail for lease, tail in self.tails.items() if lease.namespace == namespace))
        found = histories(tokens)
        return next((n for n, history in enumerate(found) if history not in known), len(found))

    def acquire(self, tokens: np.ndarray, namespace: Namespace | None = Namespace(), *,
                max_cached_tokens: int | None = None, **options: object) -> Lease:
        longest = len(tokens) - 1 if max_cached_tokens is None else min(max_cached_tokens, len(tokens) - 1)
        expected = min(self.longest_prefix(tokens, namespace), longest)
        expected -= expected % self.granularity
        is_exact = not self.counters.num_evicted_pages and self.num_available_pages * self.page_size > len(tokens)
        promised = self.num_matching_tokens(tokens, namespace, max_cached_tokens=max_cached_tokens)
        lease = super().acquire(tokens, namespace, max_cached_tokens=max_cached_tokens, **options)
        assert lease.num_cached_tokens <= promised <= expected, "more found than there can be"
        if is_exact:
            assert lease.num_cached_tokens == expected, f"{lease.num_cached_tokens} of {expected} tokens found"
            self.num_exact += 1
        return lease

    def commit(self, lease: Lease, tokens: np.ndarray) -> None:
        super().commit(lease, tokens)
        if lease.namespace is not None:
            found = histories(tokens)
            whole = len(tokens) // self.page_size * self.page_size
            self.kept.setdefault(lease.namespace, set()).update(found[:whole])
            self.tails[lease] = found[whole:]

    def release(self, lease: Lease, tokens: np.ndarray | None = None) -> None:
        super().release(lease, tokens)
        tail = self.tails.pop(lease, [])
        if tokens is not None and lease.namespace is not None:
            self.kept.setdefault(lease.namespace, set()).update(tail)


@dataclass
class Simulation:
    """A scheduler with its device, and the two ways to drive them."""
    config: EngineConfig
    num_groups: int = 1
    plans: list[StepPlan] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    in_flight: deque[tuple[StepPlan, np.ndarray]] = field(default_factory=deque)
    streamed: dict[int, list[int]] = field(default_factory=dict)
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        config = self.config
        self.cache = WatchedCache.create(
            page_size=config.page_size, num_pages=config.num_pages, max_pages=config.max_pages_per_seq,
            num_groups=self.num_groups, enabled=config.enable_prefix_caching, num_host_pages=config.num_host_pages,
            eviction_policy=config.eviction_policy, min_ttl_s=config.min_ttl_s,
            max_pinned_fraction=config.max_pinned_fraction, clock=self.clock, granularity=config.hit_granularity)
        self.scheduler = Scheduler(config, self.cache, clock=self.clock)
        self.device = Device(self.config, self.cache)

    def clock(self) -> float:
        """A second per step, those in which nothing could run included."""
        return len(self.plans) + self.waited_s

    def add(self, prompt: Sequence[int], max_tokens: int | None = 8, *, eos: bool = False,
            first_logit: int | None = None, stop_token_ids: Sequence[int] = (),
            namespace: Namespace | None = Namespace()) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, stop_token_ids=list(stop_token_ids)).resolved({})
        room = self.config.max_model_len - len(prompt)
        request = Request(len(self.requests), np.array(prompt, np.int32), len(prompt), params,
                          room if max_tokens is None else min(max_tokens, room), frozenset({EOS} if eos else ()),
                          namespace=namespace, first_logit=first_logit, replays=self.config.deterministic)
        self.scheduler.add(request)
        self.requests.append(request)
        self.device.expect(request)
        return request

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if plan is None:
            return None
        self._check_plan(plan)
        self.in_flight.append((plan, self.device.dispatch(plan)))
        self.device.check_tree()
        self.plans.append(plan)
        return plan

    def update(self) -> None:
        for _, request, tokens in self.scheduler.update(*self.in_flight.popleft()):
            self.streamed.setdefault(request.request_id, []).extend(tokens)
        self.scheduler.check_invariants()
        self.ended += self.scheduler.take_ended()

    def step(self) -> StepPlan | None:
        """One step as the engine does it: with overlap, plan n+1 before the results of n."""
        plan = self.schedule()
        self.waited_s += plan is None
        depth = 1 if self.config.overlap and plan is not None else 0
        while len(self.in_flight) > depth:
            self.update()
        self.ended += self.scheduler.take_ended()
        return plan

    def run(self, max_steps: int = 2000) -> list[list[int]]:
        """Steps until all requests have ended; outputs in order of arrival."""
        for _ in range(max_steps):
            if self.step() is None and not list(self.scheduler.requests()):
                break
        else:
            raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.num_running} running, "
                                 f"{self.scheduler.num_waiting} waiting")
        self.check_drained()
        return [request.output_ids for request in self.requests]

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request)
        self.scheduler.check_invariants()
        self.ended += self.scheduler.take_ended()

    def check_drained(self) -> None:
        """Nothing is left behind and every request got exactly one end."""
        self.scheduler.check_invariants()
        assert not self.in_flight and not list(self.scheduler.requests())
        self.cache.pins.expire()
        assert self.cache.tree.num_locked_pages == 0 and self.cache.tree.root_locks() == 0
        assert all(pool.num_free + self.cache.tree.num_evictable_pages == pool.num_pages for pool in self.cache.pools)
        assert Counter(r.request_id for r in self.ended) == Counter(r.request_id for r in self.requests)
        assert all(r.state is RequestState.FINISHED and r.finish_reason and r.slot == -1 for r in self.requests)

    def check_outputs(self) -> None:
        """Every answer is the plain loop's, or its beginning where the reason says so."""
        for request in self.requests:
            expected, output = plain_loop(request), request.output_ids
            if request.finish_reason == "abort" or request.stop_reason == "kv_capacity":
                assert output == expected[:len(output)]
                if request.stop_reason == "kv_capacity":
                    assert request.finish_reason == "length"
                    assert request.num_prompt + len(output) == self.scheduler.pool_tokens + 1
            else:
                assert output == expected, f"request {request.request_id}"
                is_stop = bool(expected) and expected[-1] in request.stop_ids
                assert request.finish_reason == ("stop" if is_stop else "length")
            assert output == self.streamed.get(request.request_id, [])
            cached = request.num_cached_tokens
            if cached is not None:
                assert 0 <= cached < request.num_prompt
                assert request.num_computed_prompt + cached <= request.num_prompt
                if output and not request.num_preemptions:
                    assert request.num_computed_prompt + cached == request.num_prompt

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.rows and len(plan.rows) <= self.config.max_num_seqs
        if self.config.deterministic and plan.num_decode == 0:
            row, = plan.rows
            assert row.start % self.config.prefill_chunk_tokens == 0, "a chunk begins beside the grid"
            end = row.start + row.num_tokens
            assert end % self.config.prefill_chunk_tokens == 0 or end == row.request.num_prompt, "a chunk is cut short"
        else:
            assert [row.num_tokens == 1 for row in plan.rows] == [i < plan.num_decode for i in range(len(plan.rows))]
        if self.config.deterministic and plan.num_decode:
            assert all(row.start >= row.request.num_prompt for row in plan.rows), "prompt tokens in a decode row"
        assert plan.num_prefill_tokens <= self.config.prefill_chunk_tokens
        assert len({row.slot for row in plan.rows}) == len(plan.rows) == len({id(row.request) for row in plan.rows})
        for row in plan.rows:
            assert row.request.lease.num_pages * self.config.page_size >= row.start + row.num_tokens + max(
                row.num_samples - 1, 0), "the step is short of pages"
        started = {row.slot for row in plan.rows if row.request in plan.admitted}
        assert started == {request.slot for request in plan.admitted}, "an admitted request has no row"


def small_config(**changes: object) -> EngineConfig:
    sizes = dict(page_size=4, num_pages=64, max_model_len=64, max_num_seqs=4, prefill_chunk_tokens=16, reserve_tokens=0,
                 overlap=False)
    return EngineConfig(**{**sizes, **changes})


def num_distinct_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that stand after different prefixes, counted over all prompts."""
    return len({history for prompt in prompts for history in histories(prompt)})


def prompt_of(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(n)]


both_ways = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "ahead"])


# -- any schedule gives the plain loop's tokens


@st.composite
def workloads(draw: st.DrawFn) -> tuple[EngineConfig, int, list[tuple[int, list[int], int, bool, int | None]],
                                        list[tuple[int, int]]]:
    """A configuration, KV groups, (step, prompt, max_tokens, eos, first_logit) arrivals, (step, request) aborts."""
    page_size = draw(st.sampled_from([1, 4, 16]))
    pool_tokens = draw(st.sampled_from([8, 20, 30, 80]))
    if draw(st.sampled_from([False, False, True])):
        fixed = dict(deterministic=True, shared_attention=False, jump_decoding=False,
                     prefill_chunk_tokens=page_size * draw(st.sampled_from([1, 2, 4])))
    else:
        fixed = dict(decode_steps=draw(st.sampled_from([1, 3])),
                     prefill_chunk_tokens=draw(st.sampled_from([1, 3, 8, 32])))
    config = EngineConfig(
        page_size=page_size, num_pages=max(pool_tokens // page_size, 2), max_model_len=draw(st.sampled_from([16, 40])),
        max_num_seqs=draw(st.sampled_from([1, 3, 5])), overlap=draw(st.booleans()), **fixed,
        enable_prefix_caching=draw(st.sampled_from([True, True, False])), share_in_batch=draw(st.booleans()),
        admission_window=draw(st.sampled_from([1, 4])), max_bypass=draw(st.sampled_from([0, 2])),
        reserve_tokens=draw(st.sampled_from([0, 0, 6])), eviction_policy=draw(st.sampled_from(["lru", "lfu", "slru"])),
        num_host_pages=draw(st.sampled_from([0, 0, 2, 9, 30])), min_ttl_s=draw(st.sampled_from([0.0, 0.0, 3.0])),
        max_wait_s=draw(st.sampled_from([0.0, 4.0])), thrash_window_s=draw(st.sampled_from([0.0, 6.0])),
        thrash_share=draw(st.sampled_from([0.0, 0.25])))
    longest = min(config.max_model_len, config.pool_tokens) - 1
    arrivals = []
    for _ in range(draw(st.integers(1, 9))):
        shared = draw(st.sampled_from([0, 4, 8, 8, longest]))
        rest = draw(st.lists(st.integers(1, 2), max_size=4))
        prompt = ([draw(st.sampled_from([1, 1, 2, 3]))] * shared + rest)[:longest] or [1]
        arrivals.append((draw(st.sampled_from([0, 0, 1, 5, 9])), prompt, draw(st.sampled_from([0, 1, 3, 9, 20, 20])),
                         draw(st.booleans()), draw(st.sampled_from([None, None, 0, 3]))))
    aborts = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=2))
    return config, draw(st.sampled_from([1, 1, 2])), arrivals, aborts


def run_workload(config: EngineConfig, num_groups: int, arrivals: list, aborts: list[tuple[int, int]]) -> Simulation:
    simulation = Simulation(config, num_groups)
    waiting = sorted(arrivals, key=lambda arrival: arrival[0])
    for now in range(14):
        while waiting and waiting[0][0] <= now:
            _, prompt, max_tokens, eos, first_logit = waiting.pop(0)
            first_logit = None if first_logit is None else min(first_logit, len(prompt) - 1)
            simulation.add(prompt, max_tokens, eos=eos, first_logit=first_logit)
        for when, which in aborts:
            if when == now and which < len(simulation.requests):
                simulation.abort(simulation.requests[which])
        simulation.step()
    simulation.run()
    simulation.check_outputs()
    return simulation


@settings(max_examples=110, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(workload=workloads())
def test_schedule_any_workload_gives_the_tokens_of_a_plain_loop(workload: tuple) -> None:
    run_workload(*workload)


@pytest.mark.parametrize("decode_steps", [1, 3])
@pytest.mark.parametrize("page_size, num_pages", [(1, 40), (4, 12), (16, 4)])
@both_ways
def test_schedule_tight_pool_preempts_and_loses_no_token(overlap: bool, page_size: int, num_pages: int,
                                                         decode_steps: int) -> None:
    """Preempted requests resume with no token lost or doubled, whatever the page size."""
    preemptions = 0
    for seed in range(6):
        rng = random.Random(seed)
        simulation = Simulation(small_config(
            page_size=page_size, num_pages=num_pages, max_num_seqs=5, overlap=overlap, prefill_chunk_tokens=12,
            decode_steps=decode_steps, num_host_pages=10 * (seed % 2)))
        for i in range(9):
            prompt = [1] * rng.randrange(12) + prompt_of(rng.randrange(1, 9), rng.randrange(3))
            if i > 4:       # the next turn of an earlier request, which may still run
                earlier = rng.choice(simulation.requests)
                prompt = [*earlier.tokens[:earlier.num_prompt].tolist(), *plain_loop(earlier), 1]
            simulation.add(prompt[:min(60, num_pages * page_size) - 1], rng.randrange(1, 28), eos=rng.random() < 0.3)
            for _ in range(i):
                simulation.step()
        simulation.run()
        simulation.check_outputs()
        preemptions += simulation.scheduler.counters.num_preemptions
    assert preemptions > 3


@pytest.mark.parametrize("decode_steps", [1, 3])
@pytest.mark.parametrize("page_size", [1, 2, 4])
@both_ways
def test_next_turn_finds_the_output_of_the_last_one(overlap: bool, page_size: int, decode_steps: int) -> None:
    """To the last token but the last sampled one, whose KV need not exist; also where a stop cut a step short."""
    for seed in range(8):
        simulation = Simulation(small_config(page_size=page_size, overlap=overlap, decode_steps=decode_steps))
        first = simulation.add(prompt_of(7, seed), 9 + seed, eos=True)
        simulation.run()
        whole = [*prompt_of(7, seed), *first.output_ids]
        second = simulation.add([*whole, 1, 2], 3)
        simulation.run()
        simulation.check_outputs()
        assert second.num_cached_tokens == len(whole) - 1
        assert second.cache_use.num_copied_tokens == (len(whole) - 1) % page_size


# -- requests that do not fit


def test_add_prompt_larger_than_the_pool_is_refused_and_the_others_run() -> None:
    """S01: the error names both numbers; nothing waits behind it."""
    simulation = Simulation(small_config(num_pages=8))
    with pytest.raises(RequestError, match=r"40 tokens needs room for 41 tokens.*holds 32"):
        simulation.add(prompt_of(40))
    for seed in range(3):
        simulation.add(prompt_of(4, seed))
    simulation.run(max_steps=50)
    simulation.check_outputs()


@both_ways
@pytest.mark.parametrize("decode_steps", [1, 3])
def test_decode_last_request_outgrows_the_pool_ends_with_kv_capacity(overlap: bool, decode_steps: int) -> None:
    """S03: it ends by length with the detail, and the next request works."""
    simulation = Simulation(small_config(page_size=2, num_pages=6, overlap=overlap, decode_steps=decode_steps))
    request = simulation.add(prompt_of(4), 50)
    simulation.run()
    assert len(request.output_ids) == 9
    assert (request.finish_reason, request.stop_reason) == ("length", "kv_capacity")
    simulation.add(prompt_of(4), 3)
    simulation.run()
    simulation.check_outputs()
    assert simulation.requests[1].stop_reason is None


@both_ways
def test_prefill_of_a_resumed_request_beyond_the_pool_ends_with_kv_capacity(overlap: bool) -> None:
    simulation = Simulation(small_config(page_size=2, num_pages=6, overlap=overlap))
    for seed in range(2):
        simulation.add(prompt_of(4, seed), 50)
    simulation.run()
    assert simulation.scheduler.counters.num_preemptions > 0
    assert [(len(r.output_ids), r.stop_reason) for r in simulation.requests] == [(9, "kv_capacity")] * 2
    simulation.check_outputs()


def test_prefill_without_pages_beside_a_running_request_is_put_back_and_not_ended() -> None:
    """A standstill of prefills is broken by preemption as long as another request may still free pages."""
    simulation = Simulation(small_config(num_pages=12, overlap=True))
    scored, request = simulation.add(prompt_of(4), 0), simulation.add(prompt_of(24, 1), 4)
    simulation.step()
    assert scored.state is request.state is RequestState.RUNNING and request.num_computed == 12
    others = simulation.cache.acquire(np.array([9], np.int32))
    simulation.cache.extend(others, simulation.cache.num_available_pages * 4)
    assert simulation.step() is None
    assert request.state is RequestState.WAITING and request.num_preemptions == 1 and scored.finish_reason == "length"
    simulation.cache.release(others)
    simulation.run()
    simulation.check_outputs()
    assert request.stop_reason is None


@both_ways
def test_output_cut_by_the_models_length_says_so(overlap: bool) -> None:
    simulation = Simulation(small_config(max_model_len=12, overlap=overlap))
    requests = [simulation.add(prompt_of(8), max_tokens) for max_tokens in (None, 9, 4)]
    simulation.run()
    assert [(len(r.output_ids), r.finish_reason, r.stop_reason) for r in requests] == [
        (4, "length", "max_model_len"), (4, "length", "max_model_len"), (4, "length", None)]


# -- preemption


@both_ways
@pytest.mark.parametrize("decode_steps", [1, 3])
def test_preemption_two_requests_give_the_tokens_of_an_ample_pool(overlap: bool, decode_steps: int) -> None:
    """S04: both have all 12 tokens, none spliced, and the stream is the final output."""
    outputs = []
    for num_pages in (10, 64):
        simulation = Simulation(small_config(page_size=2, num_pages=num_pages, overlap=overlap,
                                             decode_steps=decode_steps))
        for seed in range(2):
            simulation.add(prompt_of(4, seed), 12)
        outputs.append(simulation.run())
        simulation.check_outputs()
        assert (simulation.scheduler.counters.num_preemptions >= 1) == (num_pages == 10)
    assert outputs[0] == outputs[1] and all(len(output) == 12 for output in outputs[0])


def test_preemption_need_is_counted_in_pages() -> None:
    """S13: four need a page and one is free: exactly one request goes, the youngest."""
    simulation = Simulation(small_config(num_pages=9, prefill_chunk_tokens=32))
    requests = [simulation.add(prompt_of(7, seed), 20) for seed in range(4)]
    while min(request.num_tokens for request in requests) < 9:
        simulation.step()
    assert [request.num_computed for request in requests] == [8] * 4 and simulation.cache.num_available_pages == 1
    plan = simulation.schedule()
    assert len(plan.rows) == 3 and simulation.scheduler.counters.num_preemptions == 1
    assert requests[3].state is RequestState.WAITING and requests[3].num_preemptions == 1
    simulation.update()
    simulation.run()
    simulation.check_outputs()


@both_ways
def test_preemption_keeps_cached_tokens_and_the_hit_rate(overlap: bool) -> None:
    """S12: cached tokens are those of the first admission; a resumed request is not looked up again."""
    simulation = Simulation(small_config(num_pages=7, overlap=overlap, max_num_seqs=2))
    first = simulation.add(prompt_of(12), 1)
    simulation.run()
    others = [simulation.add(prompt_of(5, 1), 12), simulation.add(prompt_of(12), 10)]
    simulation.run()
    assert others[1].num_preemptions > 0 and others[1].num_cached_tokens == 11 and first.num_cached_tokens == 0
    counters = simulation.cache.counters
    assert (counters.num_lookups, counters.num_lookup_tokens, counters.num_hit_tokens) == (3, 29, 11)
    assert simulation.scheduler.counters.num_cached_prompt_tokens == 11
    simulation.check_outputs()


def test_preemption_inside_a_prompt_counts_each_prompt_token_once() -> None:
    """Prompt tokens run for the first time are counted even when that is after a preemption."""
    simulation = Simulation(small_config(num_pages=7, prefill_chunk_tokens=4))
    simulation.add(prompt_of(4, 1), 14)
    late = simulation.add(prompt_of(17), 2)
    while not late.num_preemptions and late.state is not RequestState.FINISHED:
        simulation.step()
    assert late.num_preemptions and 0 < late.num_computed_prompt < 17
    simulation.run()
    counters = simulation.scheduler.counters
    assert late.num_computed_prompt == 17 and counters.num_computed_prompt_tokens == 21
    simulation.check_outputs()


@both_ways
def test_preempted_request_resumes_before_later_arrivals(overlap: bool) -> None:
    """Also while its last token is in flight: the slot and pages it gave up are not handed to a newcomer first."""
    simulation = Simulation(small_config(page_size=2, num_pages=12, overlap=overlap, max_num_seqs=2))
    first, large = simulation.add(prompt_of(4), 14), simulation.add(prompt_of(13, 1), 6)
    small = simulation.add(prompt_of(2, 2), 6)
    while not large.num_preemptions:
        simulation.step()
    assert first.state is RequestState.RUNNING and small.state is RequestState.WAITING
    simulation.run()
    order = [request.request_id for plan in simulation.plans for request in plan.admitted]
    assert order == [0, 1, 1, 2]
    simulation.check_outputs()


# -- abort


@both_ways
@pytest.mark.parametrize("num_chunks", [0, 1, 2, 4, 5])
def test_abort_between_chunks_returns_all_private_pages_at_once(overlap: bool, num_chunks: int) -> None:
    """S05: after the abort the pages are free or cached, and there is one end with reason abort."""
    simulation = Simulation(small_config(page_size=2, num_pages=40, prefill_chunk_tokens=4, overlap=overlap))
    request = simulation.add(prompt_of(20), 8, first_logit=0)
    for _ in range(num_chunks):
        simulation.schedule()
        if not overlap:
            simulation.update()
    simulation.abort(request)
    cache = simulation.cache
    assert request.finish_reason == "abort" and cache.num_available_pages == 40 and cache.tree.root_locks() == 0
    while simulation.in_flight:
        simulation.update()
    simulation.abort(request)
    simulation.check_drained()
    assert request.output_ids == plain_loop(request)[:len(request.output_ids)]


@pytest.mark.parametrize("decode_steps", [1, 3])
def test_abort_with_a_step_in_flight_drops_its_result(decode_steps: int) -> None:
    """S07: the late result is dropped, nothing of the output enters the tree, the other outputs do not change."""
    simulation = Simulation(small_config(overlap=True, max_num_seqs=5, decode_steps=decode_steps, page_size=2))
    requests = [simulation.add(prompt_of(4 + seed, seed), 20) for seed in range(5)]
    for _ in range(5):
        simulation.step()
    assert simulation.in_flight and requests[2].num_in_flight and requests[2].num_output > 2
    simulation.schedule()
    known = requests[2].output_ids
    simulation.abort(requests[2])
    whole = [*requests[2].tokens[:requests[2].num_prompt].tolist(), *plain_loop(requests[2])]
    assert simulation.cache.tree.match(whole, touch=False).num_tokens <= requests[2].num_prompt
    simulation.run()
    assert requests[2].output_ids == known and requests[2].finish_reason == "abort"
    simulation.check_outputs()
    assert [r.output_ids for r in requests if r is not requests[2]] == [
        plain_loop(r) for r in requests if r is not requests[2]]


def test_abort_waiting_and_preempted_requests_ends_them_once() -> None:
    simulation = Simulation(small_config(page_size=2, num_pages=10, max_num_seqs=2))
    requests = [simulation.add(prompt_of(4, seed), 12) for seed in range(3)]
    while not requests[1].num_preemptions:
        simulation.step()
    simulation.abort(requests[1])
    simulation.abort(requests[2])
    simulation.run()
    assert [r.finish_reason for r in requests] == ["length", "abort", "abort"]
    simulation.check_outputs()


# -- ends


@both_ways
@pytest.mark.parametrize("end", ["length", "stop"])
def test_pages_after_drain_are_all_accounted_for(overlap: bool, end: str) -> None:
    """R01: by length and by stop token, with and without one step ahead, three times over."""
    simulation = Simulation(small_config(page_size=1, num_pages=64, overlap=overlap))
    for _ in range(3):
        reference = plain_loop(Request(0, np.array(prompt_of(5), np.int32), 5, SamplingParams(), 7))
        stop_at = reference.index(reference[4]) if end == "stop" else 6
        request = simulation.add(prompt_of(5), 7, stop_token_ids=[reference[4]] if end == "stop" else [])
        simulation.run()
        assert request.finish_reason == end and len(request.output_ids) == stop_at + 1
        assert request.stop_reason == (reference[4] if end == "stop" else None)
        pool, lease = simulation.cache.pools[0], request.lease
        assert lease is None and pool.num_free + simulation.cache.tree.num_evictable_pages == 64
        simulation.abort(request)
        assert pool.num_free + simulation.cache.tree.num_evictable_pages == 64
    simulation.check_outputs()


@both_ways
def test_requests_that_end_in_their_prefill_step_leak_no_slot(overlap: bool) -> None:
    """S11: fifty one-token requests beside running decodes, some of them with EOS as their first token."""
    simulation = Simulation(small_config(overlap=overlap, num_pages=128))
    eos_first = next(seed for seed in range(1000) if next_token(histories(prompt_of(6, seed))[-1]) == EOS)
    for i in range(50):
        if i % 10 == 0:
            simulation.add(prompt_of(5, i), 20)
        simulation.add(prompt_of(6, eos_first if i % 3 == 0 else i), 1 if i % 2 else 8, eos=True)
        simulation.step()
    simulation.run()
    simulation.check_outputs()
    assert any(r.finish_reason == "stop" and r.num_output == 1 for r in simulation.requests)
    assert simulation.scheduler.num_running == 0 and len(simulation.requests) == 55


@both_ways
def test_max_tokens_zero_computes_the_prompt_and_samples_nothing(overlap: bool) -> None:
    simulation = Simulation(small_config(overlap=overlap, prefill_chunk_tokens=8))
    request = simulation.add(prompt_of(20), 0, first_logit=0)
    other = simulation.add(prompt_of(20), 3)
    simulation.run()
    assert (request.output_ids, request.finish_reason, request.stop_reason) == ([], "length", None)
    assert request.num_computed_prompt == 20 and all(
        row.num_samples == 0 for plan in simulation.plans for row in plan.rows if row.request is request)
    assert len(other.output_ids) == 3
    simulation.check_outputs()


def test_stop_token_in_a_multi_step_call_drops_what_follows() -> None:
    simulation = Simulation(small_config(decode_steps=3, overlap=True))
    requests = [simulation.add(prompt_of(5, seed), 30, eos=True) for seed in range(4)]
    simulation.run()
    simulation.check_outputs()
    assert any(plan.num_steps == 3 for plan in simulation.plans)
    assert any(r.finish_reason == "stop" for r in requests)


class StopAtThird:
    """A stop search that finds its text in the third token."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str | None:
        self.num_tokens += len(token_ids)
        return "end" if self.num_tokens >= 3 else None


@both_ways
@pytest.mark.parametrize("decode_steps", [1, 3])
def test_stop_string_ends_the_request_at_its_token(overlap: bool, decode_steps: int) -> None:
    """The device knows nothing of stop strings: what it sampled after the end is dropped."""
    simulation = Simulation(small_config(overlap=overlap, decode_steps=decode_steps))
    request, other = simulation.add(prompt_of(5), 20), simulation.add(prompt_of(7, 1), 20)
    request.stop_search = StopAtThird()
    simulation.run()
    assert request.output_ids == plain_loop(request)[:3]
    assert (request.finish_reason, request.stop_reason) == ("stop", "end")
    assert other.output_ids == plain_loop(other) and len(other.output_ids) == 20


# -- pages under pressure


def test_chunked_prefill_keeps_its_committed_pages_until_it_ends() -> None:
    """E05: pages committed in the middle of a prefill are locked; the newcomer waits."""
    simulation = Simulation(small_config(page_size=2, num_pages=10, prefill_chunk_tokens=4))
    first = simulation.add(prompt_of(16), 3)
    simulation.step()
    second = simulation.add(prompt_of(8, 1), 3)
    held: set[int] = set()
    while first.state is RequestState.RUNNING:
        pages = set(first.lease.page_table[0, :first.lease.num_pages].tolist())
        assert held <= pages and not pages & set(simulation.cache.pools[0].free_pages().tolist())
        held = pages
        simulation.step()
    assert first.num_preemptions == 0
    simulation.run()
    simulation.check_outputs()
    assert len(second.output_ids) == 3


def test_admission_keeps_room_for_the_output_of_running_requests() -> None:
    """The reserve rule: a request waits while what the others may still write would not fit beside it."""
    for reserve, is_admitted in ((0, True), (16, False)):
        simulation = Simulation(small_config(num_pages=8, reserve_tokens=reserve, max_num_seqs=2))
        simulation.add(prompt_of(8), 16)
        simulation.step()
        second = simulation.add(prompt_of(8, 1), 4)
        simulation.step()
        assert (second.state is RequestState.RUNNING) == is_admitted
        simulation.run()
        simulation.check_outputs()
        assert simulation.scheduler.counters.num_preemptions == 0 or is_admitted


def test_admission_refused_for_pages_counts_no_lookup() -> None:
    simulation = Simulation(small_config(num_pages=8, reserve_tokens=16, max_num_seqs=2))
    simulation.add(prompt_of(8), 16)
    simulation.add(prompt_of(8), 16)
    for _ in range(4):
        simulation.step()
    counters = simulation.cache.counters
    assert (counters.num_lookups, counters.num_lookup_tokens, counters.num_hit_tokens) == (1, 8, 0)
    simulation.run()
    assert (counters.num_lookups, counters.num_lookup_tokens) == (2, 16)


def test_evicted_prefix_comes_back_from_the_host_to_the_last_token() -> None:
    """Whole pages and the tail go to the host and come back, in the order of the moves."""
    simulation = Simulation(small_config(num_pages=8, num_host_pages=20))
    prompts = [prompt_of(15, seed) for seed in range(4)]
    for prompt in prompts:
        simulation.add(prompt, 4)
        simulation.run()
    moved = simulation.device.num_moved_pages
    assert moved[MoveKind.OUT] == simulation.cache.counters.num_spilled_pages > 8 and not moved[MoveKind.IN]
    again = simulation.add(prompts[0], 4)
    simulation.run()
    simulation.check_outputs()
    assert again.num_cached_tokens == 14 and moved[MoveKind.IN] >= 4
    use = again.cache_use
    assert (use.num_host_tokens, use.num_copied_tokens, use.num_evicted_tokens) == (12, 2, 0)
    assert simulation.scheduler.counters.num_computed_prompt_tokens == 4 * 15 + 1


def test_evicted_prefix_without_host_is_computed_again_and_counted() -> None:
    simulation = Simulation(small_config(num_pages=8))
    for seed in (0, 1, 2, 3, 0):
        simulation.add(prompt_of(15, seed), 4)
        simulation.run()
    simulation.check_outputs()
    use = simulation.requests[-1].cache_use
    assert (use.num_cached_tokens, use.num_host_tokens, use.num_evicted_tokens) == (0, 0, 12)
    assert simulation.cache.counters.num_recomputed_tokens == 12


# -- young pages


def fill_pool(**changes: object) -> Simulation:
    """A pool of 8 pages, full of two prefixes: the first last used at 4 s, the second at 8 s."""
    simulation = Simulation(small_config(num_pages=8, max_num_seqs=2, **changes))
    for seed in range(2):
        simulation.add(prompt_of(13, seed), 4)
        simulation.run()
    assert simulation.cache.num_free_pages == 0 and simulation.clock() == 10
    return simulation


def admission(simulation: Simulation, request: Request, max_steps: int = 60) -> float:
    """When a request was admitted, by the simulation's clock."""
    for _ in range(max_steps):
        simulation.step()
        if request.admitted_s is not None:
            return request.admitted_s
    raise AssertionError(f"not admitted in {max_steps} steps")


def test_admission_waits_for_young_pages_then_evicts_the_oldest() -> None:
    """Up to max_wait_s; the eviction is counted, and takes the pages unused for longest."""
    simulation = fill_pool(min_ttl_s=1000.0, max_wait_s=6.0)
    request = simulation.add(prompt_of(10, 7), 2)
    assert not simulation.scheduler.waits_for_age
    assert simulation.step() is None and simulation.scheduler.waits_for_age
    assert admission(simulation, request) == 10 + 6 and not simulation.scheduler.waits_for_age
    assert simulation.cache.counters.num_early_evictions > 0
    simulation.run()
    simulation.check_outputs()
    second = np.array(prompt_of(13, 1), np.int32)
    assert simulation.cache.num_matching_tokens(second, Namespace()) == 12
    assert simulation.cache.num_matching_tokens(np.array(prompt_of(13), np.int32), Namespace()) < 8


def test_admission_takes_pages_that_grew_old_without_waiting_longer() -> None:
    simulation = fill_pool(min_ttl_s=12.0, max_wait_s=500.0)
    used_s = sorted({node.used_s for node in simulation.cache.tree.nodes()})
    request = simulation.add(prompt_of(10, 7), 2)
    assert admission(simulation, request) == used_s[0] + 12 > 10
    assert simulation.cache.counters.num_early_evictions == 0
    simulation.run()
    simulation.check_outputs()


def test_admission_of_a_cached_prompt_does_not_wait_for_young_pages() -> None:
    """What it needs is there; only the page it writes makes room for itself."""
    simulation = fill_pool(min_ttl_s=1000.0, max_wait_s=500.0)
    simulation.cache.evict(np.array(prompt_of(13), np.int32))
    assert simulation.cache.num_free_pages == 4
    request = simulation.add(prompt_of(13, 1) + [1], 2)
    assert admission(simulation, request) == 10 and request.num_cached_tokens == 13
    simulation.run()
    simulation.check_outputs()
    assert simulation.cache.counters.num_early_evictions == 0


def test_admission_without_max_wait_evicts_young_pages_at_once() -> None:
    simulation = fill_pool(min_ttl_s=1000.0, max_wait_s=0.0)
    request = simulation.add(prompt_of(10, 7), 2)
    assert admission(simulation, request) <= 11
    assert simulation.cache.counters.num_early_evictions > 0


# -- pins


def test_running_request_gets_the_pages_of_a_pin_that_expires_meanwhile() -> None:
    """In the middle of its prefill, when there is not one other page left."""
    simulation = Simulation(small_config(num_pages=8))
    simulation.add(prompt_of(16), 1)
    simulation.run()
    simulation.cache.pin(np.array(prompt_of(16), np.int32), ttl_s=5.0)
    request = simulation.add(prompt_of(28, 1), 3)
    simulation.step()
    assert request.num_computed == 16 and simulation.cache.num_available_pages == 0
    simulation.waited_s += 10
    simulation.run()
    simulation.check_outputs()
    assert (request.finish_reason, request.stop_reason) == ("length", None)


def test_waiting_request_gets_the_pages_of_a_pin_that_expired() -> None:
    simulation = Simulation(small_config(num_pages=8, reserve_tokens=4))
    simulation.add(prompt_of(16), 1)
    simulation.run()
    simulation.cache.pin(np.array(prompt_of(16), np.int32), ttl_s=8.0)
    running, waiting = simulation.add(prompt_of(4, 1), 8), simulation.add(prompt_of(14, 2), 3)
    simulation.step()
    assert running.state is RequestState.RUNNING and waiting.state is RequestState.WAITING
    assert admission(simulation, waiting) < 12
    simulation.run()
    simulation.check_outputs()
    assert simulation.scheduler.counters.num_preemptions == 0


# -- thrashing


def thrash(**changes: object) -> Simulation:
    """Three prefixes in turn, each computed again because the pool holds one; then two long answers run."""
    config = dict(num_pages=26, max_model_len=100, max_num_seqs=4, prefill_chunk_tokens=64, thrash_window_s=200.0,
                  thrash_share=0.25)
    simulation = Simulation(small_config(**{**config, **changes}))
    for seed in (0, 1, 2) * 3:
        simulation.add(prompt_of(60, seed), 1)
        simulation.run()
    for seed in (20, 21):
        simulation.add(prompt_of(5, seed), 40)
    for _ in range(3):
        simulation.step()
    assert simulation.scheduler.num_running == 2 and simulation.cache.num_free_pages < 5
    return simulation


def test_thrash_guard_holds_back_new_prefixes_while_running_work_ends() -> None:
    simulation = thrash()
    running, guard = simulation.requests[-2:], simulation.scheduler.thrash_guard
    assert guard.is_active and (guard.limit, guard.num_activations) == (2, 1)
    num_computed = simulation.scheduler.counters.num_computed_prompt_tokens
    assert guard.recomputed_share == pytest.approx(6 * 56 / num_computed, rel=0.05)
    held = simulation.add(prompt_of(20, 30), 2)
    while all(request.finished_s is None for request in running):
        assert held.admitted_s is None
        simulation.step()
    simulation.run()
    assert held.admitted_s >= min(request.finished_s for request in running)
    simulation.check_outputs()


def test_thrash_guard_lets_a_prompt_in_that_evicts_nothing() -> None:
    simulation = thrash()
    simulation.cache.clear()
    small = simulation.add(prompt_of(20, 30), 2)
    simulation.step()
    assert simulation.scheduler.thrash_guard.is_active and small.admitted_s is not None
    simulation.run()
    simulation.check_outputs()


def test_thrash_guard_lets_go_when_the_window_has_passed() -> None:
    """While the long answers still run: nothing was computed again for `thrash_window_s`."""
    simulation = thrash(thrash_window_s=30.0)
    running, now = simulation.requests[-2:], simulation.clock()
    held = simulation.add(prompt_of(20, 30), 2)
    assert now + 10 < admission(simulation, held) <= now + 32
    assert all(request.finished_s is None for request in running)
    assert not simulation.scheduler.thrash_guard.is_active
    simulation.run()
    simulation.check_outputs()


@pytest.mark.parametrize("changes", [dict(thrash_window_s=0.0), dict(thrash_share=1.0), dict(max_bypass=0)])
def test_thrash_guard_off_or_overruled_admits_at_once(changes: dict[str, object]) -> None:
    """Without window, above any share, or for one that nobody may pass over any more."""
    simulation = thrash(**changes)
    request = simulation.add(prompt_of(20, 30), 2)
    simulation.step()
    assert request.admitted_s is not None and simulation.scheduler.num_running == 3
    simulation.run()
    simulation.check_outputs()


# -- sharing and fairness


@both_ways
def test_same_prefix_in_one_batch_is_computed_once(overlap: bool) -> None:
    """S09: and the switch turns it off without changing a token."""
    prompts, outputs, computed = [prompt_of(64) + prompt_of(4, seed + 1) for seed in range(8)], [], []
    for share in (True, False):
        simulation = Simulation(small_config(max_model_len=128, num_pages=200, max_num_seqs=8,
                                             prefill_chunk_tokens=1024, overlap=overlap, share_in_batch=share))
        for prompt in prompts:
            simulation.add(prompt, 6)
        outputs.append(simulation.run())
        simulation.check_outputs()
        computed.append(simulation.scheduler.counters.num_computed_prompt_tokens)
    assert computed == [num_distinct_tokens(prompts), 8 * 68]
    assert outputs[0] == outputs[1]


@both_ways
@pytest.mark.parametrize("chunk_tokens", [7, 256])
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_prefixes_of_odd_lengths_in_one_batch_are_computed_once(overlap: bool, page_size: int,
                                                                chunk_tokens: int) -> None:
    """Prompts that part anywhere in a page: the work is the number of distinct tokens, whatever the size of a page."""
    common = prompt_of(70)
    prompts = [common[:n] + [VOCAB + n, *prompt_of(3, n)] for n in (0, 1, 3, 5, 15, 17, 31, 63, 65, 67, 70)]
    prompts += [[*prompts[5], 1], [*prompts[5], 2, 2], [*prompts[0], 5, 5, 5]]
    random.Random(page_size).shuffle(prompts)
    simulation = Simulation(small_config(
        page_size=page_size, num_pages=2560 // page_size, max_model_len=128, max_num_seqs=8,
        prefill_chunk_tokens=chunk_tokens, overlap=overlap, admission_window=16))
    for prompt in prompts:
        simulation.add(prompt, 2)
    simulation.run()
    simulation.check_outputs()
    num_run_again = sum(prompt == other[:len(prompt)] for prompt in prompts for other in prompts) - len(prompts)
    computed = simulation.scheduler.counters.num_computed_prompt_tokens
    assert num_distinct_tokens(prompts) <= computed <= num_distinct_tokens(prompts) + num_run_again
    assert simulation.cache.num_exact == len(prompts) and simulation.device.num_moved_pages[MoveKind.COPY] > 5


@both_ways
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_same_prompt_many_times_in_one_batch_runs_one_token_each_after_the_first(overlap: bool, page_size: int) -> None:
    """The page that the first one is still writing is copied for the others, though no page of it may be full."""
    simulation = Simulation(small_config(page_size=page_size, num_pages=640 // page_size, prefill_chunk_tokens=5,
                                         overlap=overlap))
    requests = [simulation.add(prompt_of(23), 6) for _ in range(4)]
    simulation.run()
    simulation.check_outputs()
    assert [request.num_cached_tokens for request in requests] == [0, 22, 22, 22]
    assert [request.cache_use.num_copied_tokens for request in requests] == [0, *[22 % page_size] * 3]
    assert simulation.scheduler.counters.num_computed_prompt_tokens == 23 + 3


@pytest.mark.parametrize("waits, changes", [
    (True, dict()),
    (True, dict(matched=9)),                                        # the very last shared token
    (False, dict(matched=10)),                                      # from here on they differ
    (False, dict(num_computed=7)),                                  # computed already: no use to wait for it
    (False, dict(num_computed=12)),
    (True, dict(first_logit=7)),
    (False, dict(first_logit=6)),                                   # the next token is run for its logits anyway
    (False, dict(matched=10, tokens=[*range(10), 90])),             # only the last token is left: it is run anyway
    (False, dict(namespace=None, other=None)),
    (False, dict(namespace=Namespace(salt="a"))),
    (False, dict(num_computed=12, num_output=1)),                   # decodes
])
def test_waiting_for_a_token_only_while_another_is_about_to_compute_it(waits: bool, changes: dict[str, object]) -> None:
    """`request` and `running` share ten tokens, of which `matched` are cached."""
    case = dict(matched=6, num_computed=6, num_output=0, first_logit=None, namespace=Namespace(), other=Namespace(),
                tokens=[*range(10), 90, 91])
    case.update(changes)
    running = Request(0, np.arange(13, dtype=np.int32), 13 - case["num_output"], SamplingParams(), 9,
                      namespace=case["other"])
    running.num_tokens, running.num_computed = 13, case["num_computed"]
    request = Request(1, np.array(case["tokens"], np.int32), len(case["tokens"]), SamplingParams(), 9,
                      namespace=case["namespace"], first_logit=case["first_logit"])
    assert shares_pending_prefix(request, case["matched"], running) == waits


@pytest.mark.parametrize("share_in_batch", [True, False])
def test_request_without_namespace_neither_reads_nor_writes_the_cache(share_in_batch: bool) -> None:
    simulation = Simulation(small_config(num_pages=40, share_in_batch=share_in_batch))
    simulation.add(prompt_of(18), 3)
    simulation.run()
    before = [(node.key, node.pages.tolist()) for node in simulation.cache.tree.nodes()]
    private = [simulation.add(prompt_of(18), 3, namespace=None), simulation.add(prompt_of(9, 1), 3, namespace=None),
               simulation.add(prompt_of(9, 1), 3, namespace=None)]
    simulation.run()
    assert [(node.key, node.pages.tolist()) for node in simulation.cache.tree.nodes()] == before
    assert [request.num_cached_tokens for request in private] == [0, 0, 0]
    assert simulation.cache.num_free_pages == 40 - sum(len(pages[0]) for _, pages in before)
    late = simulation.add(prompt_of(9, 1), 3)
    simulation.run()
    assert late.num_cached_tokens == 0
    simulation.check_outputs()


def test_requests_of_two_namespaces_share_nothing() -> None:
    """R11: not by the tree, not by waiting for each other."""
    simulation = Simulation(small_config(num_pages=40, prefill_chunk_tokens=32))
    spaces = (Namespace(), Namespace(salt="a"), Namespace(salt=("a",)), Namespace(salt="a"))
    requests = [simulation.add(prompt_of(8), 3, namespace=space) for space in spaces]
    simulation.step()
    assert [request.state is RequestState.RUNNING for request in requests] == [True, True, True, False]
    simulation.run()
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 7]
    simulation.check_outputs()


def test_same_prompt_in_one_step_leaves_one_copy() -> None:
    """R02 at the level of the scheduler: both miss, the loser's page table names the winner's pages."""
    simulation = Simulation(small_config(page_size=2, num_pages=32, share_in_batch=False))
    requests = [simulation.add(prompt_of(8), 7) for _ in range(2)]
    simulation.step()
    one, other = (request.lease.page_table[0, :4].tolist() for request in requests)
    assert one == other and simulation.cache.tree.num_locked_pages == 4
    free = set(simulation.cache.pools[0].free_pages().tolist())
    assert not free & set(one)
    for page in free:
        simulation.device.kv[0].update({page * 2: -1, page * 2 + 1: -2})
    assert simulation.run() == [plain_loop(request) for request in requests]


def test_waiting_for_a_prefix_does_not_hold_up_other_prompts() -> None:
    simulation = Simulation(small_config(prefill_chunk_tokens=8, max_num_seqs=4))
    first, same = simulation.add(prompt_of(24), 4), simulation.add(prompt_of(24), 4)
    other = simulation.add(prompt_of(4, 9), 4)
    simulation.step()
    simulation.step()
    assert same.state is RequestState.WAITING and first.state is RequestState.RUNNING
    for _ in range(3):
        simulation.step()
    assert other.num_output > 0 and same.num_cached_tokens == 23
    simulation.run()
    simulation.check_outputs()


@pytest.mark.parametrize("max_bypass", [0, 1, 3])
def test_longest_prefix_first_passes_nobody_over_more_often_than_allowed(max_bypass: int) -> None:
    simulation = Simulation(small_config(max_num_seqs=1, max_bypass=max_bypass, num_pages=40, prefill_chunk_tokens=64))
    simulation.add(prompt_of(16), 1)
    simulation.run()
    cold = simulation.add(prompt_of(5, 3), 1)
    hot = [simulation.add(prompt_of(16) + prompt_of(2, seed), 1) for seed in range(6)]
    simulation.run()
    order = [request.request_id for plan in simulation.plans for request in plan.admitted]
    assert order[1:].index(cold.request_id) == max_bypass == cold.num_passed_over
    assert all(request.num_passed_over == 0 for request in hot)
    simulation.check_outputs()


def test_choose_prefers_long_matches_then_arrival_then_the_overtaken() -> None:
    def request(passed_over: int = 0, preemptions: int = 0) -> Request:
        made = Request(0, np.ones(4, np.int32), 4, SamplingParams(), 1)
        made.num_passed_over, made.num_preemptions = passed_over, preemptions
        return made

    window = [request(), request(), request()]
    none = [False] * 3
    assert choose(window, [0, 4, 4], none, 8) == 1
    assert choose(window, [0, 4, 8], none, 8) == 2
    assert choose(window, [0, 4, 8], [False, False, True], 8) == 1
    assert choose(window, [4, 4, 4], none, 8) == 0
    assert choose(window, [0, 4, 8], [True] * 3, 8) is None
    assert choose([], [], [], 8) is None
    assert choose([request(), request(passed_over=8), request()], [0, 0, 8], none, 8) == 1
    assert choose([request(), request(passed_over=8), request()], [0, 0, 8], [False, True, False], 8) == 2
    assert choose([request(), request(preemptions=1), request()], [0, 0, 8], none, 8) == 1


@pytest.mark.parametrize("num_prompt", [12, 13, 15, 20])
def test_prompt_cached_as_a_whole_still_runs_its_last_token(num_prompt: int) -> None:
    """R16: one token exactly, wherever in a page it stands: never an empty forward pass, and nothing twice."""
    simulation = Simulation(small_config(prefill_chunk_tokens=8))
    for _ in range(2):
        request = simulation.add(prompt_of(num_prompt), 3)
        first_step = len(simulation.plans)
        simulation.run()
    row, = simulation.plans[first_step].rows
    assert (row.start, row.num_tokens, row.num_samples) == (num_prompt - 1, 1, 1)
    assert request.num_cached_tokens == num_prompt - 1 and request.output_ids == simulation.requests[0].output_ids
    simulation.check_outputs()


# -- the shape of a plan


def test_plan_mixes_decode_rows_first_and_respects_the_chunk_budget() -> None:
    simulation = Simulation(small_config(prefill_chunk_tokens=24, max_num_seqs=4))
    early = simulation.add(prompt_of(4), 20)
    simulation.step()
    late = [simulation.add(prompt_of(44, 1), 4), simulation.add(prompt_of(9, 2), 4)]
    plan = simulation.step()
    assert [(row.request, row.num_tokens) for row in plan.rows] == [(early, 1), (late[0], 24)]
    assert (plan.num_decode, plan.num_prefill_tokens, plan.num_steps) == (1, 24, 1)
    plan = simulation.step()
    assert [(row.request, row.num_tokens, row.num_samples) for row in plan.rows] == [
        (early, 1, 1), (late[0], 20, 1), (late[1], 4, 0)]
    assert plan.admitted == [late[1]]
    simulation.run()
    simulation.check_outputs()


def test_multi_step_decode_waits_until_nothing_is_to_be_admitted() -> None:
    simulation = Simulation(small_config(decode_steps=3, max_num_seqs=1))
    simulation.add(prompt_of(4), 7)
    simulation.add(prompt_of(4, 1), 7)
    simulation.run()
    steps = [(plan.rows[0].request.request_id, plan.num_steps) for plan in simulation.plans]
    assert {k for request, k in steps if request == 0} == {1}
    assert [k for request, k in steps if request == 1] == [1, 3, 3]
    simulation.check_outputs()


def test_multi_step_decode_without_room_for_all_tokens_runs_single_steps() -> None:
    simulation = Simulation(small_config(decode_steps=3, page_size=1, num_pages=8, max_num_seqs=1))
    request = simulation.add(prompt_of(5), 30)
    simulation.run()
    assert [plan.num_steps for plan in simulation.plans] == [1, 3, ]
    assert len(request.output_ids) == 4 and request.stop_reason == "kv_capacity"


@both_ways
def test_logit_rows_cover_each_wanted_position_of_every_prompt(overlap: bool) -> None:
    """Also after a preemption in the middle of the prompt; the tokens before the first one may come from the cache."""
    for num_pages, first_logit in ((40, 0), (40, 9), (9, 0), (9, 9)):
        simulation = Simulation(small_config(num_pages=num_pages, prefill_chunk_tokens=6, overlap=overlap))
        simulation.add(prompt_of(14, 1), 12)
        wanted = [simulation.add(prompt_of(18), 3, first_logit=first_logit) for _ in range(2)]
        positions: dict[int, set[int]] = {}
        while list(simulation.scheduler.requests()):
            plan = simulation.step()
            for row in plan.rows if plan else ():
                positions.setdefault(row.request.request_id, set()).update(range(*row.logit_span))
        for request in wanted:
            assert positions[request.request_id] == set(range(first_logit, 17))
            assert request.num_cached_tokens <= first_logit
        simulation.run()
        simulation.check_outputs()


@both_ways
@pytest.mark.parametrize("fixed", [{}, dict(deterministic=True)])
def test_prompt_goes_on_with_the_pages_that_decoding_gave_up(overlap: bool, fixed: dict) -> None:
    """A pin takes the room of the older prompt; the younger one, admitted first for its prefix, decodes until it
    preempts itself. Its pages are enough for the older one, which must not be ended for want of room."""
    simulation = Simulation(small_config(
        page_size=4, num_pages=26, prefill_chunk_tokens=16, max_model_len=96, max_num_seqs=4, reserve_tokens=0,
        overlap=overlap, max_pinned_fraction=1.0, shared_attention=False, jump_decoding=False, **fixed))
    pinned, cached = np.array(prompt_of(49, 9)[:48], np.int32), prompt_of(20, 2)
    for prompt in (pinned.tolist() + [1], cached):
        simulation.add(prompt, 1)
        simulation.run()
    older, younger = simulation.add(prompt_of(40, 1), 4), simulation.add([*cached, 3], 60)
    for _ in range(2):
        simulation.step()
    simulation.cache.pin(pinned)
    while older.state is not RequestState.FINISHED:
        simulation.step()
    simulation.cache.pins.clear()
    simulation.run()
    assert (older.num_output, older.stop_reason) == (4, None)
    assert younger.num_output > 4 and younger.num_preemptions > 0
    simulation.check_outputs()
