"""Random operations on the whole cache, against a device and a host of which every page's content is known.

A page holds, for each of its places, the prefix (as a number) whose KV stands there. Moves are carried out in order,
then free pages are poisoned, then the step writes: exactly what the engine does. After every step each lease, each
cached node on the device and each on the host must hold the prefixes that its tokens say.
"""
from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from jradix.batch import MoveKind
from jradix.cache.node import Namespace, Tier
from jradix.cache.prefix_cache import Lease, PrefixCache
from jradix.errors import OutOfPages, PagesTooYoung, PinError

POISON = -1
NAMESPACES = (Namespace(), Namespace(salt="a"), Namespace(salt=("a", "b")), None)


@dataclass(eq=False)
class Job:
    """A request: tokens known, tokens whose KV is written or booked."""
    namespace: Namespace | None
    tokens: list[int]
    lease: Lease
    num_computed: int


@dataclass
class World:
    """The cache, and the contents of all pages as the device and the host would have them."""
    rng: random.Random
    page_size: int
    num_pages: int
    num_host_pages: int
    policy: str
    min_ttl_s: float = 0.0
    now: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    histories: list[list[int]] = field(default_factory=lambda: [[]])
    known: set[tuple] = field(default_factory=set)        # prefixes with KV somewhere, while nothing was evicted
    num_exact: int = 0
    num_copies: int = 0
    num_loads: int = 0

    def __post_init__(self) -> None:
        self.cache = PrefixCache.create(
            page_size=self.page_size, num_pages=self.num_pages, max_pages=self.num_pages,
            num_host_pages=self.num_host_pages, eviction_policy=self.policy, min_ttl_s=self.min_ttl_s,
            clock=lambda: self.now)
        self.device = np.full((self.num_pages + 1, self.page_size), POISON, object)
        self.host = np.full((self.num_host_pages + 1, self.page_size), POISON, object)

    # -- operations

    def plan(self) -> None:
        """One step: some requests decode, some are admitted, all that was booked is written."""
        rng, booked = self.rng, []
        for job in list(self.jobs):
            if job in self.jobs and rng.random() < 0.6:
                try:
                    self.cache.extend(job.lease, job.num_computed + 1)
                except OutOfPages:
                    self.leave(rng.choice(self.jobs), keep=True)
                    continue
                booked.append((job, job.num_computed, 1, False))
        booked = [entry for entry in booked if entry[0] in self.jobs]
        for _ in range(rng.randrange(3)):
            if (job := self.admit()) is not None:
                n = len(job.tokens) - job.num_computed
                if rng.random() < 0.3:
                    n = rng.randint(1, n)
                try:
                    self.cache.extend(job.lease, job.num_computed + n)
                except OutOfPages:
                    self.leave(job, keep=True)
                    continue
                booked.append((job, job.num_computed, n, True))
        writes = []
        for job, start, n, is_prefill in booked:
            while len(job.tokens) < start + n:
                job.tokens.append(rng.randrange(3))
            job.num_computed = start + n
            if is_prefill:
                self.commit(job)
        for job, start, n, _ in booked:
            for i in range(start, start + n):
                page = int(job.lease.page_table[0, i // self.page_size])
                writes.append((page, i % self.page_size, prefix(job.namespace, job.tokens, i)))
        self.carry_out_moves()
        for page, place, content in writes:
            self.device[page, place] = content

    def admit(self) -> Job | None:
        rng = self.rng
        namespace = rng.choice(NAMESPACES[:2] * 3 + NAMESPACES)
        history = rng.choice(self.histories)
        tokens = history[:rng.randint(0, len(history))] + [
            rng.randrange(3) for _ in range(rng.randint(1, 2 * self.page_size))]
        if rng.random() < 0.2 and history:
            tokens = list(history)
        tokens = tokens[:self.page_size * self.num_pages // 2]
        array = np.array(tokens, np.int32)
        expected = 0
        while expected < len(tokens) - 1 and prefix(namespace, tokens, expected) in self.known:
            expected += 1
        was_evicting = self.cache.counters.num_evicted_pages, self.cache.num_available_pages
        try:
            lease = self.cache.acquire(array, namespace, num_wanted_tokens=rng.choice((0, len(tokens))),
                                       num_reserved_pages=rng.randrange(3), allow_young=rng.random() < 0.7)
        except PagesTooYoung:
            assert self.min_ttl_s > 0
            return None
        except OutOfPages:
            return None
        assert lease.num_cached_tokens <= max(len(tokens) - 1, 0)
        if self.num_exact >= 0 and was_evicting[1] > 2:
            assert lease.num_cached_tokens == (expected if namespace is not None else 0), (tokens, expected)
            self.num_exact += 1
        job = Job(namespace, tokens, lease, lease.num_cached_tokens)
        self.jobs.append(job)
        return job

    def commit(self, job: Job) -> None:
        self.cache.commit(job.lease, np.array(job.tokens[:job.num_computed], np.int32))
        self.learn(job)

    def learn(self, job: Job) -> None:
        if job.namespace is not None:
            self.known.update(prefix(job.namespace, job.tokens, i) for i in range(job.num_computed))

    def leave(self, job: Job, *, keep: bool) -> None:
        """A request ends, is preempted (its KV stays) or aborted."""
        self.jobs.remove(job)
        self.cache.release(job.lease, np.array(job.tokens[:job.num_computed], np.int32) if keep else None)
        if keep:
            self.learn(job)
            self.histories = [*self.histories[-12:], job.tokens[:job.num_computed]]

    def by_hand(self) -> None:
        """What a user does: pins, unpins, evicts, clears; time passes."""
        rng, cache = self.rng, self.cache
        tokens = np.array(rng.choice(self.histories), np.int32)
        namespace = rng.choice(NAMESPACES[:3])
        match rng.randrange(6):
            case 0 | 1:
                try:
                    cache.pin(tokens, namespace, ttl_s=rng.choice((None, 1.0, 5.0)))
                except PinError:
                    pass
            case 2:
                try:
                    cache.pins.remove(tokens, namespace)
                except PinError:
                    pass
            case 3:
                cache.evict(tokens[:rng.randint(0, len(tokens))], namespace)
                self.num_exact = -1
            case 4:
                if rng.random() < 0.2:
                    cache.clear(unpin=rng.random() < 0.5)
                    self.num_exact = -1
        self.now += rng.random()

    # -- contents

    def carry_out_moves(self) -> None:
        for kind, source, target in self.cache.take_moves():
            for a, b in zip(source[0], target[0]):
                if kind is MoveKind.COPY:
                    self.device[b] = self.device[a].copy()
                    self.num_copies += 1
                elif kind is MoveKind.OUT:
                    self.host[b] = self.device[a].copy()
                else:
                    self.device[b] = self.host[a].copy()
                    self.num_loads += 1
        self.device[self.cache.pools[0].free_pages()] = POISON
        for pool in self.cache.host_pools:
            self.host[pool.free_pages()] = POISON

    def check(self) -> None:
        cache, size = self.cache, self.page_size
        cache.check_invariants()
        for job in self.jobs:
            for i in range(job.num_computed):
                assert self.device[job.lease.page_table[0, i // size], i % size] == prefix(job.namespace, job.tokens, i)
        for node in cache.tree.nodes():
            namespace, tokens = cache.tree.namespace_of(node), cache.tree.tokens_of(node).tolist()
            start = len(tokens) - len(node.key) // 4
            pages = self.device if node.tier is Tier.DEVICE else self.host
            for i in range(start, len(tokens)):
                assert pages[node.pages[0, (i - start) // size], (i - start) % size] == prefix(namespace, tokens, i)


def prefix(namespace: Namespace | None, tokens: list[int], last: int) -> tuple:
    """Names the KV of position `last`: it depends on all tokens up to there, and on the namespace."""
    return namespace, tuple(tokens[:last + 1])


def run(world: World, num_operations: int, *, by_hand: bool) -> None:
    rng = world.rng
    for _ in range(num_operations):
        choice = rng.random()
        if choice < 0.6:
            world.plan()
        elif choice < 0.9 and world.jobs:
            world.leave(rng.choice(world.jobs), keep=rng.random() < 0.85)
        elif by_hand:
            world.by_hand()
        world.carry_out_moves()
        if world.cache.counters.num_evicted_pages and not world.num_host_pages:
            world.num_exact = -1
        world.check()
    for job in list(world.jobs):
        world.leave(job, keep=True)
    world.check()
    world.cache.clear(unpin=True)
    assert world.cache.num_free_pages == world.num_pages and not list(world.cache.tree.nodes())
    assert world.cache.tree.root_locks() == 0


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", range(2))
def test_large_pool_finds_the_longest_common_prefix_to_the_token(page_size: int, seed: int) -> None:
    world = World(random.Random(f"large {page_size} {seed}"), page_size, 20_000 // page_size, 0, "lru")
    run(world, 150, by_hand=False)
    assert world.num_exact > 50 and (world.num_copies > 10) == (page_size > 1)


CASES = [(page_size, policy, num_host_pages, min_ttl_s) for page_size in (1, 2, 4) for policy in ("lru", "lfu", "slru")
         for num_host_pages, min_ttl_s in ((0, 0.0), (7, 0.0), (40, 0.0), (7, 2.0))]


@pytest.mark.parametrize("page_size, policy, num_host_pages, min_ttl_s", CASES)
def test_random_operations_keep_every_content_and_count(page_size: int, policy: str, num_host_pages: int,
                                                        min_ttl_s: float) -> None:
    world = World(random.Random(f"{page_size} {policy} {num_host_pages}"), page_size, 24, num_host_pages, policy,
                  min_ttl_s)
    world.num_exact = -1
    run(world, 140, by_hand=True)
    assert world.cache.counters.num_evicted_pages > 0 and (page_size == 1 or world.num_copies > 0)


@pytest.mark.slow
@pytest.mark.parametrize("page_size, policy, num_host_pages, min_ttl_s", CASES)
def test_random_operations_many_keep_every_content_and_count(page_size: int, policy: str, num_host_pages: int,
                                                             min_ttl_s: float) -> None:
    for seed in range(40):
        world = World(random.Random(f"{page_size} {policy} {num_host_pages} {seed}"), page_size, 24, num_host_pages,
                      policy, min_ttl_s)
        world.num_exact = -1
        run(world, 140, by_hand=True)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_random_prompts_hit_the_longest_common_prefix(page_size: int) -> None:
    """1,300 prompts per page size, each against all before it."""
    rng = random.Random(page_size)
    cache = PrefixCache.create(page_size=page_size, num_pages=150_000 // page_size, max_pages=400)
    known: set[tuple[int, ...]] = set()
    prompts = [[rng.randrange(4)]]
    for _ in range(1300):
        base = rng.choice(prompts)
        prompt = base[:rng.randint(0, len(base))] + [rng.randrange(4) for _ in range(rng.randint(1, 40))]
        prompt = prompt[:300]
        expected = 0
        while expected < len(prompt) - 1 and tuple(prompt[:expected + 1]) in known:
            expected += 1
        tokens = np.array(prompt, np.int32)
        lease = cache.acquire(tokens)
        assert lease.num_cached_tokens == expected
        cache.extend(lease, len(prompt))
        cache.commit(lease, tokens)
        if rng.random() < 0.5:
            cache.commit(lease, tokens)
        cache.release(lease, tokens)
        cache.take_moves()
        known.update(tuple(prompt[:n]) for n in range(1, len(prompt) + 1))
        prompts.append(prompt)
    cache.check_invariants()
