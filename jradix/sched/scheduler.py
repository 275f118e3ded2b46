"""The scheduler: admission, chunked prefill, decode, preemption, stop conditions. It owns the requests and their slots.

It runs one step ahead of the device: `schedule` plans step n+1 while step n is still in flight. That is safe because
all device calls form one chain: a page freed while step n may still read it is not written before step n+1.
"""
from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import islice
from typing import Callable, Iterator, Sequence

import numpy as np

from jradix.cache.prefix_cache import Lease, PrefixCache
from jradix.config import SHORT_TOKENS, EngineConfig, SharingCost, StepShapes
from jradix.errors import OutOfPages, PagesTooYoung, RequestError
from jradix.outputs import CacheUse
from jradix.sched.plan import Row, SharedRows, StepPlan
from jradix.sched.policy import choose, shares_pending_prefix
from jradix.sched.request import Request, RequestState
from jradix.sched.sharing import shared_rows
from jradix.sched.thrash_guard import ThrashGuard

MAX_CHUNK_STEPS = 8     # between two decode steps, where a step is one or the other


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""
    num_steps: int = 0
    num_computed_tokens: int = 0          # all tokens run
    num_computed_prompt_tokens: int = 0   # prompt tokens run for the first time
    num_cached_prompt_tokens: int = 0     # prompt tokens found in the cache
    num_recomputed_tokens: int = 0        # tokens run again after preemption
    num_generated_tokens: int = 0
    num_forced_tokens: int = 0            # of these, appended without being drawn
    num_saved_kv_reads: int = 0           # tokens that a layer's attention did not read again for rows that share them
    num_preemptions: int = 0
    num_finished: int = 0


class Scheduler:
    """Decides what runs.

    Invariant: a request is in exactly one of {preempted, waiting, running} or finished; each running request has one
    slot and one lease.
    """

    def __init__(self, config: EngineConfig, cache: PrefixCache, *, shapes: StepShapes | None = None,
                 sharing: SharingCost | None = None, clock: Callable[[], float] = time.perf_counter):
        self.config = config
        self.cache = cache
        self._shapes = shapes or StepShapes.for_engine(config)
        self._sharing = (sharing or SharingCost()) if config.shared_attention else None
        self._shared: tuple[list[tuple], list[SharedRows]] = [], []     # groups of the last step, and of which rows
        self.counters = SchedulerCounters()
        self._clock = clock
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._preempted: deque[Request] = deque()
        self._running: list[Request] = []            # in order of arrival
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._ended: list[Request] = []              # since the last take_ended
        self._admitted: list[Request] = []           # since the last plan
        self._num_chunk_steps = 0                    # since the last decode step, where the two come apart
        self.thrash_guard = ThrashGuard(config.thrash_window_s, config.thrash_share, config.max_num_seqs, clock)

    # -- requests in and out

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def requests(self) -> Iterator[Request]:
        """All unfinished requests."""
        yield from self._running
        yield from self._preempted
        yield from self._waiting.values()

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError when the pool can never hold its prompt and one more token."""
        self.check_prompt_fits(request.num_prompt)
        request.arrival_s = self._clock()
        self._waiting[request.request_id] = request

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.cache.num_pages * self.config.page_size

    def check_prompt_fits(self, num_prompt: int) -> None:
        """Raises RequestError when a prompt of this length could never run."""
        if num_prompt + 1 > self.pool_tokens:
            raise RequestError(
                f"a prompt of {num_prompt} tokens needs room for {num_prompt + 1} tokens, but the KV pool holds "
                f"{self.pool_tokens} ({self.cache.num_pages} pages of {self.config.page_size}); shorten the prompt or "
                "raise kv_cache_bytes")

    def abort(self, request: Request, reason: str = "abort") -> None:
        """Ends a request at once; results of a step in flight for it are dropped. Does nothing when it has ended."""
        if request.state is not RequestState.FINISHED:
            self._finish(request, reason, commit=False)

    # -- one step

    def schedule(self) -> StepPlan | None:
        """Plans the next step and books it as done; None when nothing can run.

        The caller dispatches the plan before it calls `schedule` again.
        """
        self.cache.pins.expire()
        decode, prefill = self._plan_apart() if self.config.deterministic else self._plan_together()
        if not decode and not prefill and self._is_stuck():
            return self.schedule()
        num_steps = 1
        if decode and self._may_run_ahead(decode, prefill):
            num_steps = self.config.decode_steps
            for row in decode:
                row.num_samples = min(num_steps, row.request.num_left)
        num_singles = 0 if self.config.deterministic else sum(row.num_tokens == 1 for row in prefill)
        plan = StepPlan([*decode, *sorted(prefill, key=lambda row: row.num_tokens > 1)], len(decode) + num_singles,
                        num_steps, num_prefill_tokens=sum(row.num_tokens for row in prefill))
        if not plan.rows:
            return None
        if self._sharing is not None:
            plan.shared = self._shared_rows(plan)
            self.counters.num_saved_kv_reads += self.config.page_size * sum(
                (len(group.rows) - 1) * group.num_pages for group in plan.shared)
        plan.page_moves = self.cache.take_moves()
        plan.admitted = [r for r in self._admitted if r.state is RequestState.RUNNING]
        self._admitted.clear()
        self._book(plan, prefill)
        return plan

    def update(self, plan: StepPlan, tokens: np.ndarray) -> list[tuple[int, Request, list[int]]]:
        """Takes in the results of a step.

        Args:
          plan: what ran.
          tokens: int32[num_steps, S] sampled tokens; only rows with samples count.

        Returns:
          (index of the row, request, new tokens) per row that gained tokens; rows of ended requests are left out.
        """
        now = self._clock()
        changed: list[tuple[int, Request, list[int]]] = []
        columns = tokens.T.tolist()
        for i, row in enumerate(plan.rows):
            request = row.request
            if request.state is RequestState.FINISHED:
                continue
            if row.num_samples == 0:
                if request.max_output == 0 and row.start + row.num_tokens == request.num_tokens:
                    self._finish(request, "length")
                continue
            request.num_in_flight -= row.num_samples
            for token in columns[i][:row.num_samples]:
                if self._append(request, token):
                    break
            self._jump(request)
            new_tokens = request.tokens[request.num_prompt + request.num_reported:request.num_tokens].tolist()
            request.num_reported = request.num_output
            if request.first_token_s is None:
                request.first_token_s = now
            if request.finish_reason is not None:
                self._finish(request, request.finish_reason)
            changed.append((i, request, new_tokens))
        return changed

    @property
    def needs_tokens(self) -> bool:
        """True when the tokens in flight must be known before the next step is planned: a jump may follow them, or
        the host makes the mask after them."""
        return any(r.num_in_flight and r.constraint is not None and r.constraint.needs_token for r in self._running)

    def take_ended(self) -> list[Request]:
        """Requests that ended since the last call, aborted ones included, each once."""
        ended, self._ended = self._ended, []
        return ended

    def check_invariants(self) -> None:
        """Recomputes slots, states and pages by walking; raises AssertionError with what differs."""
        slots = [r.slot for r in self._running]
        assert sorted(slots + self._free_slots) == list(range(self.config.max_num_seqs)), "slots lost or doubled"
        assert all(r.state is RequestState.RUNNING and r.lease is not None for r in self._running)
        waiting = [*self._preempted, *self._waiting.values()]
        assert all(r.state is RequestState.WAITING and r.lease is None and r.slot == -1 for r in waiting)
        assert [r.request_id for r in self._running] == sorted(r.request_id for r in self._running)
        for request in self._running:
            assert request.num_computed <= request.num_tokens + request.num_in_flight, "more computed than known"
            assert request.lease.num_pages * self.config.page_size >= request.num_computed, "KV beyond the lease"
        self.cache.check_invariants()

    # -- planning

    def _plan_together(self) -> tuple[list[Row], list[Row]]:
        """Decode rows, and as many prefill tokens beside them as the budget allows."""
        decode = self._plan_decode()
        budget = self.config.prefill_chunk_tokens
        prefill, skipped = self._plan_short(len(decode), budget)
        budget -= sum(row.num_tokens for row in prefill)
        for request in [r for r in self._running if _needs_chunk(r) and r.num_pending > SHORT_TOKENS]:
            budget -= self._add_chunk(prefill, request, budget)
        budget -= self._admit(prefill, budget)
        if any(row.num_tokens > SHORT_TOKENS for row in prefill):     # then there is room for all
            for request in skipped:
                budget -= self._add_chunk(prefill, request, budget)
        return decode, prefill

    def _plan_apart(self) -> tuple[list[Row], list[Row]]:
        """One chunk of one prompt, or else all decode rows: a token's place in a step does not depend on others.

        Chunks come first, as more rows decode together then, but only so many in a row.
        """
        prefill = self._plan_one_chunk() if self._num_chunk_steps < MAX_CHUNK_STEPS else []
        decode = [] if prefill else self._plan_decode()
        if not prefill and not decode:
            prefill = self._plan_one_chunk()      # planning to decode may have given up what a prompt waits for
        self._num_chunk_steps = self._num_chunk_steps + 1 if prefill else 0
        return decode, prefill

    def _plan_one_chunk(self) -> list[Row]:
        rows: list[Row] = []
        for request in self._running:
            if _needs_chunk(request) and self._add_chunk(rows, request, self.config.prefill_chunk_tokens):
                return rows
        self._admit(rows, self.config.prefill_chunk_tokens)
        return rows

    def _plan_decode(self) -> list[Row]:
        """Rows for all running requests that need one more token, oldest first; preempts the youngest when short."""
        rows: list[Row] = []
        waiting_rows = deque(r for r in self._running if (r.num_pending == 1 or r.replays and r.num_pending > 1)
                             and not _needs_chunk(r) and r.num_left > 0)
        while waiting_rows:
            request = waiting_rows.popleft()
            try:
                self.cache.extend(request.lease, request.num_computed + 1)
            except OutOfPages:
                planned = {row.request.request_id for row in rows}
                victim = next(r for r in reversed(self._running) if r.request_id not in planned)
                if victim is request and len(self._running) == 1:
                    if request.num_in_flight == 0:
                        request.stop_reason = "kv_capacity"
                        self._finish(request, "length")
                    return rows    # with a token in flight the request ends, or grows no further, at the next call
                self._preempt(victim)
                if victim is not request:
                    if victim in waiting_rows:
                        waiting_rows.remove(victim)
                    waiting_rows.appendleft(request)
                continue
            rows.append(Row(request, request.num_computed, 1, request.slot, int(request.num_pending == 1),
                            request.num_in_flight > 0, request.num_output + request.num_in_flight))
        return rows

    def _plan_short(self, num_rows: int, budget: int) -> tuple[list[Row], list[Request]]:
        """Rows for what running requests lack of a few known tokens, as many as a short step beside `num_rows` decode
        rows has room for, those that waited longest first; and the requests left out.

        A token in a step that is full costs less than one in a larger step that is not.
        """
        rows: list[Row] = []
        skipped: list[Request] = []
        waiting = [r for r in self._running if _needs_chunk(r) and r.num_pending <= SHORT_TOKENS]
        num_tokens = num_rows
        wanted = num_rows + sum(r.num_pending for r in waiting)
        for request in sorted(waiting, key=lambda r: -r.num_skipped_steps):
            room = (self._shapes.short_capacity(num_rows + len(rows) + 1, wanted) or 2**30) - num_tokens
            if rows and room < request.num_pending:
                request.num_skipped_steps += 1
                skipped.append(request)
            elif num_planned := self._add_chunk(rows, request, min(room, budget)):
                num_tokens += num_planned
                budget -= num_planned
        return rows, skipped

    def _shared_rows(self, plan: StepPlan) -> list[SharedRows]:
        """The last step's groups as long as the same leases hold the same nodes: their prefixes are still the same."""
        held = [(row.request.lease, row.request.lease.node, row.num_tokens) for row in plan.rows]
        if held != self._shared[0]:
            self._shared = held, shared_rows(plan, self._sharing, self.config.page_size)
        return self._shared[1]

    def _add_chunk(self, rows: list[Row], request: Request, budget: int) -> int:
        """Adds the next chunk of a running request to `rows`; returns what it takes of the budget, 0 for no room."""
        row = self._plan_chunk(request, budget)
        if row is None:
            return 0
        request.num_skipped_steps = 0
        rows.append(row)
        return budget if self.config.deterministic else row.num_tokens

    def _plan_chunk(self, request: Request, budget: int) -> Row | None:
        """The next prefill chunk of a running request, as long as budget and pages allow."""
        n = min((request.num_prompt if request.replays else request.num_tokens) - request.num_computed, budget)
        room = request.lease.num_pages * self.config.page_size - request.num_computed
        room += self.cache.num_available_pages * self.config.page_size
        if self.config.deterministic and n > room:
            return None         # a chunk is computed as a whole
        n = min(n, room)
        if n <= 0:
            return None
        self.cache.extend(request.lease, request.num_computed + n)
        is_last = request.num_computed + n == request.num_tokens
        return Row(request, request.num_computed, n, request.slot, int(is_last and request.num_left > 0), False,
                   request.num_output, request.first_logit)

    def _admit(self, prefill: list[Row], budget: int) -> int:
        """Starts waiting requests while slots, budget and pages last; adds their first chunks to `prefill`.

        Returns:
          The tokens of these chunks.
        """
        if any(r.num_in_flight for r in self._preempted):
            return 0            # they resume first, once their tokens are known: nobody takes what they gave up
        if not (self._free_slots and budget > 0):
            return 0
        window = self._admission_window()
        if not window:
            return 0
        total = budget
        matched = [self.cache.num_matching_tokens(r.known_tokens, r.namespace, max_cached_tokens=r.longest_hit)
                   for r in window]
        computing = [r for r in self._running if r.is_prefilling]
        self.thrash_guard.observe(self.counters.num_computed_prompt_tokens, self.cache.counters.num_recomputed_tokens,
                                  len(self._running))
        blocked = [self._waits_for_prefix(r, m, computing) for r, m in zip(window, matched)]
        while window and self._free_slots and budget:
            i = choose(window, matched, blocked, self.config.max_bypass)
            if i is None or self._is_held(window[i], matched[i]) or not self._start(window[i]):
                break
            request = window.pop(i)
            del matched[i], blocked[i]
            for earlier, is_blocked in zip(window[:i], blocked):
                earlier.num_passed_over += not is_blocked
            self._admitted.append(request)
            num_planned = self._add_chunk(prefill, request, budget)
            if not num_planned:
                break
            budget -= num_planned
            blocked = [was or self._waits_for_prefix(r, m, (request,)) for was, r, m in zip(blocked, window, matched)]
        return total - budget

    def _admission_window(self) -> list[Request]:
        """The requests that may be admitted next: preempted ones, then others whose grammar is ready.

        What their grammars say must come first is appended to them; one that ends with that never runs.
        """
        window = list(self._preempted)
        ready = (r for r in self._waiting.values() if r.constraint is None or r.constraint.is_ready)
        for request in list(islice(ready, max(self.config.admission_window - len(window), 0))):
            self._jump(request)
            if request.finish_reason is not None:
                request.first_token_s = self._clock()
                self._finish(request, request.finish_reason, commit=False)
            else:
                window.append(request)
        return window

    def _is_held(self, request: Request, matched: int) -> bool:
        """True where the cache thrashes and this request would evict once more while enough others run."""
        if len(self._running) < self.thrash_guard.limit or request.num_passed_over >= self.config.max_bypass:
            return False
        page_size = self.config.page_size
        wanted = -(-request.num_tokens // page_size) - matched // page_size
        return wanted > self.cache.num_free_pages

    def _start(self, request: Request) -> bool:
        """Moves a waiting request to the running ones if its tokens fit beside what the others may still need."""
        constraint, is_resumed = request.constraint, request.cache_use is not None
        if constraint is not None and not constraint.try_acquire():
            return False
        wanted = request.num_tokens + min(request.num_left, self.config.reserve_tokens) if self._running else 0
        try:
            lease = self.cache.acquire(
                request.known_tokens, request.namespace, max_cached_tokens=request.longest_hit, is_resumed=is_resumed,
                num_wanted_tokens=wanted, num_reserved_pages=self._pages_reserved(),
                allow_young=self._may_evict_young(request))
        except OutOfPages as error:
            if isinstance(error, PagesTooYoung) and request.young_since_s is None:
                request.young_since_s = self._clock()
            if constraint is not None:
                constraint.release()
            return False
        if is_resumed:
            self._preempted.remove(request)
        else:
            del self._waiting[request.request_id]
            found = (min(n, request.num_prompt) for n in (lease.num_cached_tokens, lease.num_host_tokens,
                                                          lease.num_copied_tokens, lease.num_evicted_tokens))
            request.cache_use = CacheUse(*found)      # the cache may know forced tokens after the prompt, too
            request.admitted_s = self._clock()
            self.counters.num_cached_prompt_tokens += request.cache_use.num_cached_tokens
        request.state = RequestState.RUNNING
        request.lease = lease
        request.num_computed = lease.num_cached_tokens
        request.slot = self._free_slots.pop()
        insort(self._running, request, key=lambda r: r.request_id)
        return True

    def _may_evict_young(self, request: Request) -> bool:
        """False while a request should rather wait than evict what was used less than min_ttl_s ago."""
        if self.config.min_ttl_s == 0:
            return True
        return request.young_since_s is not None and self._clock() - request.young_since_s >= self.config.max_wait_s

    @property
    def waits_for_age(self) -> bool:
        """True when nothing can run until cached prefixes have become old enough to be evicted."""
        return not self._running and any(
            r.young_since_s is not None for r in (*self._preempted, *self._waiting.values()))

    def _pages_wanted(self, request: Request, lease: Lease) -> int:
        """Pages a request lacks for its tokens and the first part of its output."""
        tokens = request.num_tokens + min(request.num_left, self.config.reserve_tokens)
        return -(-tokens // self.config.page_size) - lease.num_pages

    def _pages_reserved(self) -> int:
        """Pages the running requests are expected to take."""
        return sum(max(self._pages_wanted(r, r.lease), 0) for r in self._running)

    def _waits_for_prefix(self, request: Request, matched: int, computing: Sequence[Request]) -> bool:
        return (self.config.share_in_batch and self.cache.enabled and not request.num_preemptions
                and any(shares_pending_prefix(request, matched, r, self.cache.granularity) for r in computing))

    def _may_run_ahead(self, decode: list[Row], prefill: list[Row]) -> bool:
        """True when several decode steps may run in one call: nothing to admit, and room for all their tokens."""
        k = self.config.decode_steps
        if k == 1 or prefill or self.num_waiting:
            return False
        if any(row.request.constraint is not None and row.request.constraint.needs_token for row in decode):
            return False
        wanted = [(row.request.lease, row.start + min(k, row.request.num_left)) for row in decode]
        pages = sum(max(-(-tokens // self.config.page_size) - lease.num_pages, 0) for lease, tokens in wanted)
        if pages > self.cache.num_available_pages:
            return False
        for lease, tokens in wanted:
            self.cache.extend(lease, tokens)
        return True

    def _is_stuck(self) -> bool:
        """Breaks a standstill: only prefills run, none could get a page. True when a request was put back or ended."""
        stalled = [r for r in self._running if _needs_chunk(r)]
        if not stalled or any(r.num_in_flight for r in self._running):
            return False
        if len(self._running) > 1:
            self._preempt(self._running[-1])
        else:
            stalled[0].stop_reason = "kv_capacity"
            self._finish(stalled[0], "length")
        return True

    # -- bookkeeping

    def _book(self, plan: StepPlan, prefill: list[Row]) -> None:
        """Counts the planned tokens as computed and hands full pages of prefill chunks to the tree."""
        self.counters.num_steps += 1
        for row in plan.rows:
            request = row.request
            request.num_computed = row.start + row.num_tokens + max(row.num_samples - 1, 0)
            request.num_in_flight += row.num_samples
            self.counters.num_computed_tokens += row.num_tokens + max(row.num_samples - 1, 0)
            self.counters.num_recomputed_tokens += max(
                min(row.start + row.num_tokens, request.num_lost) - row.start, 0)
        for row in prefill:
            request = row.request
            num_had = request.cache_use.num_cached_tokens + request.num_computed_prompt    # also before a preemption
            num_first = max(min(row.start + row.num_tokens, request.num_prompt) - max(row.start, num_had), 0)
            request.num_computed_prompt += num_first
            self.counters.num_computed_prompt_tokens += num_first
            if request.num_computed >= request.num_prompt:
                request.first_logit = None     # all wanted prompt logits are on their way
            self.cache.commit(request.lease, self._shareable(request, min(request.num_computed, request.num_tokens)))

    def _shareable(self, request: Request, num_written: int) -> np.ndarray:
        """Of the tokens whose KV is written, those whose KV others may use: with `deterministic` whole chunks of the
        prompt."""
        if self.config.deterministic:
            num_written = min(num_written, request.num_prompt)
            num_written -= num_written % self.cache.granularity
        return request.tokens[:num_written]

    def _append(self, request: Request, token: int) -> bool:
        """Adds an output token; True when the request ends with it."""
        request.append(token)
        self.counters.num_generated_tokens += 1
        if request.constraint is not None and token not in request.stop_ids:
            request.constraint.advance(token)
        return self._has_ended(request, token)

    def _jump(self, request: Request) -> None:
        """Appends the tokens that must come next; they are computed as a short extend, or never if they end it."""
        constraint, num_before = request.constraint, request.num_output
        if constraint is None or request.num_in_flight or request.num_left <= 0:
            return
        while request.finish_reason is None and (token := constraint.forced_token) >= 0:
            self._append(request, token)
        num_forced = request.num_output - num_before
        request.num_forced += num_forced
        self.counters.num_forced_tokens += num_forced
        if num_forced and request.has_device_state and request.slot >= 0:
            self._admitted.append(request)     # the device has not counted these tokens

    def _has_ended(self, request: Request, token: int) -> bool:
        """Sets finish_reason when the request's newest token ends it."""
        params, constraint = request.params, request.constraint
        stop = None
        if request.stop_search is not None:
            stop = request.stop_search.push((token,))
        if token in request.stop_ids:
            request.finish_reason = "stop"
            request.stop_reason = None if token in request.eos_ids else token
        elif stop is not None:
            request.finish_reason, request.stop_reason = "stop", stop
        elif constraint is not None and constraint.is_finished and not params.ignore_eos:
            request.finish_reason = "stop"
        elif request.num_output >= request.max_output:
            request.finish_reason = "length"
            if params.token_limit is None or request.max_output < params.token_limit:
                request.stop_reason = "max_model_len"
        return request.finish_reason is not None

    def _preempt(self, request: Request) -> None:
        """Puts a running request back into the queue; what it computed stays in the tree, evictable."""
        self._leave(request, self._shareable(request, min(request.num_computed, request.num_tokens)))
        request.state = RequestState.WAITING
        request.num_lost = max(request.num_lost, request.num_computed)
        request.num_computed = 0
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._preempted.appendleft(request)

    def _finish(self, request: Request, reason: str, *, commit: bool = True) -> None:
        if request.state is RequestState.RUNNING:
            # The KV of the last sampled token may be missing: it is written by the next step, if there is one.
            num_written = min(request.num_computed, request.num_tokens - (request.num_output > 0))
            self._leave(request, self._shareable(request, num_written) if commit else None)
        elif request.request_id in self._waiting:
            del self._waiting[request.request_id]
        else:
            self._preempted.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.finished_s = self._clock()
        self.counters.num_finished += 1
        self._ended.append(request)

    def _leave(self, request: Request, commit: np.ndarray | None) -> None:
        """Gives back slot and lease."""
        self._running.remove(request)
        self._free_slots.append(request.slot)
        self.cache.release(request.lease, commit)
        if request.constraint is not None:
            request.constraint.release()
        request.slot, request.lease = -1, None


def _needs_chunk(request: Request) -> bool:
    """True for prefill: tokens known to the host are still to be computed before the request decodes."""
    return request.is_prefilling and request.num_in_flight == 0
