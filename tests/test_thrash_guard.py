"""The thrash guard: when it is active, and how many requests it lets run."""
from __future__ import annotations

from dataclasses import dataclass

import pytest

from jradix.sched.thrash_guard import MIN_RUNNING, ThrashGuard


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Load:
    """A guard and the totals it is shown."""
    window_s: float = 10.0
    share: float = 0.25
    max_running: int = 32
    num_computed: int = 0
    num_recomputed: int = 0

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.guard = ThrashGuard(self.window_s, self.share, self.max_running, self.clock)
        self.guard.observe(0, 0, 0)

    def step(self, num_computed: int, num_recomputed: int, *, after_s: float = 1.0, num_running: int = 32) -> bool:
        """Adds to the totals; returns whether the guard is active."""
        self.clock.now += after_s
        self.num_computed += num_computed
        self.num_recomputed += num_recomputed
        self.guard.observe(self.num_computed, self.num_recomputed, num_running)
        return self.guard.is_active


def test_guard_before_anything_was_observed_is_quiet() -> None:
    guard = ThrashGuard(10.0, 0.25, 32, Clock())
    assert (guard.is_active, guard.limit, guard.num_activations, guard.recomputed_share) == (False, 32, 0, 0.0)


@pytest.mark.parametrize("num_recomputed, is_active", [(0, False), (100, False), (101, True), (400, True)])
def test_guard_is_active_above_its_share_only(num_recomputed: int, is_active: bool) -> None:
    load = Load()
    assert load.step(400, num_recomputed) == is_active
    assert load.guard.recomputed_share == num_recomputed / 400
    assert load.guard.num_activations == is_active


def test_guard_few_tokens_say_nothing() -> None:
    """A short prompt that was evicted once is no sign of thrashing."""
    load = Load()
    assert not load.step(255, 255)
    assert load.step(1, 1)


def test_guard_without_window_is_never_active() -> None:
    load = Load(window_s=0.0)
    assert not any(load.step(1000, 1000) for _ in range(20))
    assert (load.guard.limit, load.guard.num_activations, load.guard.recomputed_share) == (32, 0, 0.0)


def test_guard_forgets_what_lies_before_the_window() -> None:
    """A second of thrashing counts for as long as the window is, and not longer."""
    load = Load()
    active = [load.step(*((500, 500) if now == 1 else (100, 0))) for now in range(1, 16)]
    assert active[:8] == [True] * 8          # 500 of 1,200
    assert active[10:] == [False] * 5 and load.guard.recomputed_share == 0.0
    assert load.guard.num_activations == 1


def test_guard_after_a_long_pause_looks_at_the_last_window() -> None:
    load = Load()
    assert load.step(500, 500)
    load.step(0, 0, after_s=1000.0)
    assert not load.step(500, 0)
    assert load.guard.recomputed_share == 0.0


def test_guard_share_is_exact_however_often_it_is_asked() -> None:
    """Samples are taken 20 times per window; what was observed since the last one counts all the same."""
    often, seldom = Load(), Load()
    for _ in range(1000):
        often.step(10, 4, after_s=0.001)
    seldom.step(10_000, 4000)
    assert often.guard.recomputed_share == seldom.guard.recomputed_share == 0.4
    assert len(often.guard._samples) <= 4


def test_guard_memory_is_bounded_by_the_window() -> None:
    load = Load()
    for _ in range(3000):
        load.step(10, 1, after_s=0.05)
    assert len(load.guard._samples) <= 23


def test_guard_counts_each_activation_once() -> None:
    load = Load()
    for _ in range(2):
        for _ in range(5):
            load.step(500, 400)
        assert load.guard.is_active
        for _ in range(30):
            load.step(500, 0)
        assert not load.guard.is_active
    assert load.guard.num_activations == 2


def test_limit_is_halved_once_per_quarter_of_a_window() -> None:
    load = Load()
    limits = []
    for _ in range(12):
        load.step(500, 400)
        limits.append(load.guard.limit)
    assert limits == [16, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2]


def test_limit_starts_from_what_runs_and_never_falls_below_the_least() -> None:
    load = Load()
    load.step(500, 400, num_running=10)
    assert load.guard.limit == 5
    load.step(500, 400, num_running=1, after_s=5.0)
    assert load.guard.limit == MIN_RUNNING
    load.step(500, 400, num_running=0, after_s=5.0)
    assert load.guard.limit == MIN_RUNNING


def test_limit_grows_by_one_per_sample_and_not_beyond_all_rows() -> None:
    load = Load(max_running=8)
    load.step(500, 400, num_running=4)
    assert load.guard.limit == 2
    load.step(0, 0, after_s=30.0)
    assert load.guard.limit == 3
    load.step(0, 0, after_s=0.1)
    assert load.guard.limit == 3          # no sample yet
    limits = []
    for _ in range(8):
        load.step(0, 0, after_s=0.5)
        limits.append(load.guard.limit)
    assert limits == [4, 5, 6, 7, 8, 8, 8, 8]
