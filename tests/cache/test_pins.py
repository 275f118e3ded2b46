"""Pins: the budget, the time they last, and what they protect from eviction."""
from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from jradix.cache.node import Namespace
from jradix.cache.prefix_cache import Lease, PrefixCache
from jradix.errors import OutOfPages, PinError

PAGE_SIZE = 4


@dataclass
class World:
    """A cache of 16 pages, 8 of which may be pinned, and its clock."""
    num_host_pages: int = 0
    max_pinned_fraction: float = 0.5
    now: float = 0.0
    cache: PrefixCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = PrefixCache.create(
            page_size=PAGE_SIZE, num_pages=16, max_pages=16, num_host_pages=self.num_host_pages,
            max_pinned_fraction=self.max_pinned_fraction, clock=lambda: self.now)

    def compute(self, tokens: np.ndarray, namespace: Namespace = Namespace()) -> None:
        """Runs a request with these tokens from its start to its end."""
        self.cache.release(self.run(tokens, namespace), tokens)
        self.cache.check_invariants()

    def run(self, tokens: np.ndarray, namespace: Namespace = Namespace()) -> Lease:
        lease = self.cache.acquire(tokens, namespace)
        self.cache.extend(lease, len(tokens))
        self.cache.commit(lease, tokens)
        self.cache.take_moves()
        return lease

    def flood(self) -> None:
        """A request that takes every page it can get."""
        lease = self.cache.acquire(prefix(1, 900_000))
        self.cache.extend(lease, self.cache.num_available_pages * PAGE_SIZE)
        self.cache.release(lease)
        self.cache.take_moves()
        self.cache.check_invariants()

    def num_cached(self, tokens: np.ndarray, namespace: Namespace = Namespace()) -> int:
        return self.cache.num_matching_tokens(np.append(tokens, 899_999).astype(np.int32), namespace)

    def pin(self, tokens: np.ndarray, namespace: Namespace = Namespace(), **options: object) -> None:
        self.compute(tokens, namespace)
        self.cache.pin(tokens, namespace, **options)
        self.cache.check_invariants()


def prefix(num_tokens: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + num_tokens, dtype=np.int32)


# -- protection


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 6, 8, 13, 32])
def test_pinned_prefix_survives_any_pressure_to_its_last_token(num_tokens: int) -> None:
    """The page in which it ends is protected as well."""
    world = World()
    world.pin(prefix(num_tokens))
    for _ in range(3):
        world.flood()
    assert world.num_cached(prefix(num_tokens)) == num_tokens
    assert world.cache.pins.num_pages == world.cache.tree.num_locked_pages == -(-num_tokens // PAGE_SIZE)


def test_pin_of_a_prefix_inside_a_longer_one_protects_its_pages_only() -> None:
    world = World()
    world.compute(prefix(24))
    world.cache.pin(prefix(10))
    assert world.cache.tree.num_locked_pages == 3
    world.flood()
    assert world.num_cached(prefix(24)) == 12
    world.cache.check_invariants()


def test_pinned_tail_survives_a_longer_commit() -> None:
    """The longer prefix stands beside it and may go; the pinned one stays."""
    world = World()
    world.pin(prefix(6))
    tail = world.cache.tree.match(prefix(6)).partial.node
    world.compute(prefix(7))
    world.compute(prefix(14))
    assert world.num_cached(prefix(14)) == 14 and tail.parent is not None and tail.lock_count == 1
    world.flood()
    assert world.num_cached(prefix(14)) == 6
    world.cache.pins.remove(prefix(6), Namespace())
    world.flood()
    assert world.num_cached(prefix(14)) == 0


def test_pinned_namespace_is_its_own() -> None:
    world = World()
    world.compute(prefix(8))
    world.pin(prefix(8), Namespace(salt="a"))
    world.flood()
    assert (world.num_cached(prefix(8)), world.num_cached(prefix(8), Namespace(salt="a"))) == (0, 8)
    with pytest.raises(PinError, match=r"these 8 tokens are not pinned \(1 other pins are\)"):
        world.cache.pins.remove(prefix(8), Namespace())
    world.cache.pins.remove(prefix(8), Namespace(salt="a"))


def test_pin_of_host_pages_keeps_them_on_the_host() -> None:
    world = World(num_host_pages=4)
    world.compute(prefix(10))
    world.flood()
    assert world.cache.tree.num_host_pages == 3
    world.cache.pin(prefix(10))
    world.compute(prefix(32, 1000))
    world.flood()
    assert world.num_cached(prefix(10)) == 10
    world.cache.check_invariants()


# -- the budget


def test_pin_beyond_the_budget_says_how_much_is_pinned_and_changes_nothing() -> None:
    """E04: room is left for a running request."""
    world = World()
    world.pin(prefix(20))
    world.compute(prefix(16, 100))
    locked = world.cache.tree.num_locked_pages
    with pytest.raises(PinError, match="16 tokens would bring the pinned pages from 5 to 9, but at most 8 may be"):
        world.cache.pin(prefix(16, 100))
    world.cache.check_invariants()
    assert (len(world.cache.pins), world.cache.pins.num_pages, world.cache.tree.num_locked_pages) == (1, 5, locked)
    world.cache.pin(prefix(12, 100))
    assert world.cache.pins.num_pages == 8
    lease = world.cache.acquire(prefix(31, 200))
    world.cache.extend(lease, 32)
    with pytest.raises(OutOfPages):
        world.cache.extend(lease, 33)
    world.cache.check_invariants()


def test_pins_with_a_common_prefix_fit_a_budget_that_their_sum_exceeds() -> None:
    world = World()
    for last in range(3):
        world.pin(np.append(prefix(20), 500 + last).astype(np.int32))
    assert (len(world.cache.pins), world.cache.pins.num_pages) == (3, 8)
    fourth = np.append(prefix(20), 509).astype(np.int32)
    world.compute(fourth)
    with pytest.raises(PinError, match="from 8 to 9"):
        world.cache.pin(fourth)


def test_pin_again_replaces_the_first() -> None:
    """Also where the budget has no room for a second one."""
    world = World()
    world.pin(prefix(32), ttl_s=5.0)
    world.cache.pin(prefix(32), ttl_s=20.0)
    assert (len(world.cache.pins), world.cache.pins.num_pages, world.cache.tree.root_locks()) == (1, 8, 1)
    world.now = 10.0
    world.flood()
    assert world.num_cached(prefix(32)) == 32
    world.cache.pins.remove(prefix(32), Namespace())
    assert world.cache.tree.num_locked_pages == 0


@pytest.mark.parametrize("fraction, max_pages", [(0.0, 0), (0.5, 8), (1.0, 16), (0.1, 1)])
def test_pin_longer_than_what_may_be_pinned_is_refused_before_it_is_computed(fraction: float, max_pages: int) -> None:
    world = World(max_pinned_fraction=fraction)
    num_tokens = max_pages * PAGE_SIZE + 1
    with pytest.raises(PinError, match=f"a prefix of {num_tokens} tokens takes {max_pages + 1} pages, but at most "
                                       f"{max_pages} may be pinned in all; .*raise max_pinned_fraction or enlarge"):
        world.cache.pins.check(num_tokens, None)
    if max_pages:
        world.cache.pins.check(num_tokens - 1, None)


def test_pin_of_what_is_not_cached_says_how_much_is() -> None:
    world = World()
    world.compute(prefix(6))
    with pytest.raises(PinError, match="only 6 of 9 tokens are cached; compute the prefix first"):
        world.cache.pin(prefix(9))
    with pytest.raises(PinError, match="only 0 of 9 tokens are cached"):
        world.cache.pin(prefix(9), Namespace(adapter="a"))
    assert len(world.cache.pins) == 0 and world.cache.tree.root_locks() == 0


def test_pin_of_no_tokens_is_refused() -> None:
    with pytest.raises(PinError, match="nothing to pin"):
        World().cache.pin(prefix(0))


@pytest.mark.parametrize("ttl_s", [-1.0, 0, -math.inf, math.inf, math.nan, "10"])
def test_pin_bad_time_to_live_is_refused(ttl_s: object) -> None:
    world = World()
    world.compute(prefix(4))
    with pytest.raises(PinError, match="ttl_s=.*expected a positive number of seconds, or None"):
        world.cache.pin(prefix(4), ttl_s=ttl_s)
    assert len(world.cache.pins) == 0 and world.cache.tree.num_locked_pages == 0


# -- time


def test_pin_time_starts_anew_with_each_hit() -> None:
    """E04: pinned at 0 for 10 s, used at 8; at 17 it is there, at 28 it is not."""
    world = World()
    world.pin(prefix(10), ttl_s=10.0)
    for now, num_found in ((8.0, 10), (17.0, 10), (28.0, 0)):
        world.now = now
        world.flood()
        lease = world.cache.acquire(np.append(prefix(10), 77).astype(np.int32))
        assert lease.num_cached_tokens == num_found, now
        world.cache.release(lease)
    assert len(world.cache.pins) == 0 and world.cache.tree.num_locked_pages == 0


@pytest.mark.parametrize("tokens, namespace", [
    (prefix(9), Namespace()), (prefix(10, 1), Namespace()), (prefix(10), Namespace(salt="a")), (prefix(10), None)])
def test_pin_time_is_not_renewed_by_other_requests(tokens: np.ndarray, namespace: Namespace | None) -> None:
    """Shorter than the pin, other tokens, or another namespace."""
    world = World()
    world.pin(prefix(10), ttl_s=10.0)
    world.now = 8.0
    world.cache.release(world.cache.acquire(tokens, namespace))
    world.now = 9.9
    world.cache.pins.expire()
    assert len(world.cache.pins) == 1
    world.now = 10.0
    world.cache.pins.expire()
    assert len(world.cache.pins) == 0


def test_pin_without_end_lasts() -> None:
    world = World()
    world.pin(prefix(10))
    world.now = 1e9
    world.flood()
    assert world.num_cached(prefix(10)) == 10


def test_expiry_never_frees_a_page_that_a_request_holds() -> None:
    """E04: locked at 9, expired at 30: nothing is freed before the request ends, all may go then."""
    world = World()
    world.pin(prefix(12), ttl_s=10.0)
    world.now = 9.0
    lease = world.cache.acquire(prefix(13))
    held = lease.page_table[0, :3].tolist()
    world.now = 30.0
    world.flood()
    assert len(world.cache.pins) == 0
    assert not set(held) & set(world.cache.pools[0].free_pages().tolist()) and world.num_cached(prefix(12)) == 12
    world.cache.release(lease)
    world.flood()
    assert world.num_cached(prefix(12)) == 0


def test_expired_pin_makes_room_for_the_request_that_needs_it() -> None:
    """Neither an extension nor an admission counts it as taken any more."""
    for wants in ("extend", "acquire"):
        world = World()
        world.pin(prefix(32), ttl_s=10.0)
        with pytest.raises(OutOfPages):
            world.cache.acquire(prefix(1, 700), num_wanted_tokens=36)
        world.now = 10.0
        if wants == "acquire":
            world.cache.acquire(prefix(1, 700), num_wanted_tokens=64)
        else:
            lease = world.cache.acquire(prefix(1, 700))
            world.cache.extend(lease, 64)
            assert lease.num_pages == 16
        world.cache.check_invariants()


def test_expired_pin_does_not_count_against_the_budget() -> None:
    world = World()
    world.pin(prefix(32), ttl_s=10.0)
    world.compute(prefix(16, 100))
    with pytest.raises(PinError, match="from 8 to 12"):
        world.cache.pin(prefix(16, 100))
    world.now = 10.0
    world.cache.pin(prefix(16, 100))
    assert world.cache.pins.num_pages == 4


# -- taking back


def test_pins_of_two_owners_end_apart() -> None:
    world, ours, theirs = World(), object(), object()
    world.pin(prefix(32), owner=ours)
    world.cache.pin(prefix(32), ttl_s=5.0, owner=theirs)
    assert (len(world.cache.pins), world.cache.pins.num_pages, world.cache.tree.root_locks()) == (2, 8, 2)
    with pytest.raises(PinError, match="these 32 tokens are not pinned"):
        world.cache.pins.remove(prefix(32), Namespace())
    world.cache.pins.remove(prefix(32), Namespace(), theirs)
    world.flood()
    assert world.num_cached(prefix(32)) == 32
    world.cache.pins.remove(prefix(32), Namespace(), ours)
    world.cache.check_invariants()
    assert world.cache.tree.num_locked_pages == 0


def test_unpin_makes_evictable_and_a_second_time_is_an_error() -> None:
    world = World()
    world.pin(prefix(10))
    world.cache.pins.remove(prefix(10), Namespace())
    world.cache.check_invariants()
    assert world.cache.tree.num_locked_pages == 0 and world.num_cached(prefix(10)) == 10
    with pytest.raises(PinError, match="these 10 tokens are not pinned"):
        world.cache.pins.remove(prefix(10), Namespace())


@pytest.mark.parametrize("tokens", [prefix(9), prefix(11), prefix(10, 1), prefix(0)])
def test_unpin_of_other_tokens_is_an_error_and_changes_nothing(tokens: np.ndarray) -> None:
    world = World()
    world.pin(prefix(10))
    with pytest.raises(PinError, match=f"these {len(tokens)} tokens are not pinned"):
        world.cache.pins.remove(tokens, Namespace())
    assert len(world.cache.pins) == 1 and world.cache.tree.num_locked_pages == 3


def test_unpin_after_expiry_is_an_error() -> None:
    world = World()
    world.pin(prefix(10), ttl_s=1.0)
    world.now = 1.0
    with pytest.raises(PinError, match="not pinned"):
        world.cache.pins.remove(prefix(10), Namespace())


def test_unpin_leaves_what_another_pin_shares() -> None:
    world = World()
    world.pin(prefix(8))
    world.pin(prefix(16))
    world.cache.pins.remove(prefix(16), Namespace())
    world.flood()
    assert world.num_cached(prefix(16)) == 8 and world.cache.pins.num_pages == 2


@pytest.mark.parametrize("unpin, num_left, num_freed", [(False, 10, 2), (True, 0, 5)])
def test_clear_spares_pins_unless_told_otherwise(unpin: bool, num_left: int, num_freed: int) -> None:
    world = World()
    world.pin(prefix(10))
    world.compute(prefix(8, 100))
    assert world.cache.clear(unpin=unpin) == num_freed
    assert (world.num_cached(prefix(10)), world.num_cached(prefix(8, 100))) == (num_left, 0)
    assert len(world.cache.pins) == (not unpin)
    world.cache.check_invariants()


def test_evict_by_hand_spares_what_is_pinned() -> None:
    world = World()
    world.compute(prefix(16))
    world.cache.pin(prefix(6))
    assert world.cache.evict(prefix(1)) == 2
    assert world.num_cached(prefix(16)) == 8
    world.cache.check_invariants()
