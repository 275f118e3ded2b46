"""The thrash guard: notices when what was evicted is computed again soon after, and lets fewer requests evict more."""
from __future__ import annotations

from collections import deque
from typing import Callable

_SAMPLES_PER_WINDOW = 20
MIN_RUNNING = 2
_MIN_COMPUTED_TOKENS = 256     # fewer in a window say nothing


class ThrashGuard:
    """Watches two running totals over a sliding window and bounds how many requests may run when one more must evict.

    While recomputed tokens are more than `share` of a window's prompt tokens the bound is halved, at most once per
    quarter of a window; otherwise it grows by one at each sample. So running work finishes before new prefixes enter.
    It never falls below `MIN_RUNNING`: with one request at a time a step costs nearly as much for less.

    Args:
      window_s: length of the window; 0 switches the guard off.
      share: recomputed among computed prompt tokens of the window, above which the cache is taken to thrash.
      max_running: the bound of a cache that does not thrash.
      clock: seconds.

    Attributes:
      limit: the bound in force.
      is_active: the last observation found the cache thrashing.
      num_activations: how often that began.
    """

    def __init__(self, window_s: float, share: float, max_running: int, clock: Callable[[], float]):
        self.limit = max_running
        self.is_active = False
        self.num_activations = 0
        self._window_s = window_s
        self._share = share
        self._max_running = max_running
        self._clock = clock
        self._samples: deque[tuple[float, int, int]] = deque()     # time, totals of computed and recomputed tokens
        self._last = 0, 0
        self._cut_s = -window_s

    @property
    def recomputed_share(self) -> float:
        """Of the window, 0 where nothing was computed in it."""
        if not self._samples:
            return 0.0
        _, computed, recomputed = self._samples[0]
        computed = self._last[0] - computed
        return (self._last[1] - recomputed) / computed if computed else 0.0

    def observe(self, num_computed: int, num_recomputed: int, num_running: int) -> None:
        """Takes in both totals since the start, in tokens, and the number of running requests."""
        if self._window_s == 0:
            return
        now = self._clock()
        self._last = num_computed, num_recomputed
        is_sample = not self._samples or now - self._samples[-1][0] >= self._window_s / _SAMPLES_PER_WINDOW
        if is_sample:
            self._samples.append((now, num_computed, num_recomputed))
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()
        was_active = self.is_active
        self.is_active = (num_computed - self._samples[0][1] >= _MIN_COMPUTED_TOKENS
                          and self.recomputed_share > self._share)
        self.num_activations += self.is_active and not was_active
        if self.is_active:
            if now - self._cut_s >= self._window_s / 4:
                self.limit, self._cut_s = max(min(self.limit, num_running) // 2,
                                              min(MIN_RUNNING, self._max_running)), now
        elif is_sample:
            self.limit = min(self.limit + 1, self._max_running)
