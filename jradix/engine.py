"""The engine: requests in, outputs out, one step at a time. The only module that sees scheduler and runner together.

    add_request -> [scheduler] -> StepPlan -> StepBatch -> [runner] -> StepOutput -> [scheduler] -> RequestOutput

With `overlap`, `step` plans and dispatches step n+1 before it fetches the results of step n.
"""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np

from jradix.batch import NUM_STOP_IDS, GrammarTables, TokenLogprobs
from jradix.cache.node import Namespace
from jradix.cache.packed_tree import Unpacked, pack, unpack
from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.snapshot import SnapshotIdentity, new_snapshot, open_snapshot
from jradix.config import EngineConfig
from jradix.errors import EngineError, GrammarError, RequestError, SnapshotError
from jradix.grammar.book import Constraint, GrammarBook
from jradix.grammar.compiler import read_schema
from jradix.grammar.table_pool import ArenaSize
from jradix.grammar.vocabulary import Vocabulary
from jradix.outputs import RequestOutput
from jradix.request_group import RequestGroup
from jradix.runner.runner import ModelRunner
from jradix.runner.step import StepOutput
from jradix.sampling_params import ENOUGH, SamplingParams
from jradix.sched.order import depth_first_order
from jradix.sched.plan import StepPlan, build_step_batch
from jradix.sched.request import Request, RequestState
from jradix.sched.scheduler import Scheduler
from jradix.tokenizer import Tokenizer


AGE_POLL_S = 0.005     # between two looks when only the passing of time can make room
GRAMMAR_WAIT_S = 0.05  # at most, for a grammar that is being compiled, when nothing else can run


@dataclass(slots=True)
class HostTime:
    """CPU seconds of the host thread, by part of a step; `wait_s` is wall time spent waiting for the device."""
    schedule_s: float = 0.0
    build_s: float = 0.0
    dispatch_s: float = 0.0
    wait_s: float = 0.0
    output_s: float = 0.0
    num_rows: int = 0


class Engine:
    """Runs requests over one model. Not thread-safe.

    Args:
      runner: the compiled model and its device state.
      config: sizes; those of the runner or smaller, the page size the same.
      tokenizer: for text and stop strings; None: token ids only.
      eos_ids: end tokens of the model.
      generation_config: the model's sampling defaults.
      seed: of the random streams of requests without one; None: not reproducible.
      model_name: names the KV in the cache.
      vocabulary: of the model's head, for grammars; None: they are refused. The runner was made with its `token_bytes`.
      grammar_start, grammar_workers, grammar_cache: of `GrammarBook`: what a request does until its grammar is
        compiled, the processes that compile, and where tables are kept.

    Raises:
      ValueError: the runner is too small for `config`.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, *, tokenizer: Tokenizer | None = None,
                 eos_ids: Sequence[int] = (), generation_config: Mapping[str, Any] | None = None,
                 seed: int | None = None, model_name: str = "", vocabulary: Vocabulary | None = None,
                 grammar_start: str = "tables", grammar_workers: int | None = None,
                 grammar_cache: Path | None = None,
                 clock: Callable[[], float] = time.perf_counter):
        _check_sizes(config, runner.config)
        self.config = config
        self.tokenizer = tokenizer
        self.host_time = HostTime()
        self._runner = runner
        self._eos_ids = frozenset(eos_ids)
        self._generation_config = dict(generation_config or {})
        self._seed = secrets.randbits(64) if seed is None else seed
        self._namespace = Namespace(model=model_name)
        self._clock = clock
        sizes = runner.grammar_sizes
        self._grammars = None if vocabulary is None or not config.grammar_bytes else GrammarBook(
            vocabulary, ArenaSize(sizes.num_rows, sizes.num_states, sizes.num_transitions, sizes.num_grammars),
            num_workers=grammar_workers, start=grammar_start, cache_folder=grammar_cache)
        self._request_ids = count()
        self._groups: dict[str, RequestGroup] = {}
        self._owner: dict[int, tuple[RequestGroup, int]] = {}     # scheduler's request id -> group, sample
        self._ready: dict[str, RequestOutput] = {}          # what `step` returns next
        self._dirty_slots: set[int] = set()                 # slots whose device history is not neutral
        self._in_flight: tuple[StepPlan, StepOutput] | None = None
        self._is_committing = False                         # pages are booked as computed, their step not dispatched
        self._is_closed = False
        self.dropped_outputs: list[RequestOutput] = []      # what an interrupt or a failed step cut off
        self._num_failures = 0
        self._num_synchronous_steps = 0
        self._reset_scheduler()

    # -- requests in and out

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None, *,
                    request_id: str | None = None, prompt: str | None = None, is_streamed: bool = False,
                    first_logit: int | None = None, num_truncated_tokens: int = 0) -> str:
        """Queues one prompt.

        Args:
          prompt_token_ids: ids, at least one.
          params: None for the model's defaults.
          request_id: the user's name for it; must not be in use. None: one is made.
          prompt: the text, only to be returned.
          is_streamed: `step` returns the growing output after each step, not only at the end.
          first_logit: log-probabilities of the prompt are wanted from this position on; the tokens up to it may come
            from the cache. With `prompt_logprobs` it is 0.
          num_truncated_tokens: what the caller cut off the prompt, only to be returned.

        Returns:
          The request id.

        Raises:
          RequestError: the prompt or a parameter cannot be served; nothing was queued.
          EngineError: the engine is closed.
        """
        self._check_open()
        params = (params or SamplingParams()).resolved(self._generation_config)
        tokens = self._check_prompt(prompt_token_ids, params)
        constraints = [self._constraint(params) for _ in range(params.n)]
        if request_id is None:
            request_id = f"request-{next(self._request_ids)}"
            while request_id in self._groups:
                request_id = f"request-{next(self._request_ids)}"
        elif request_id in self._groups:
            raise RequestError(f"request_id={request_id!r} is in use by a request that has not ended")
        if first_logit is None and params.prompt_logprobs is not None:
            first_logit = 0
        room = self.config.max_model_len - len(tokens)
        max_output = room if params.token_limit is None else min(params.token_limit, room)
        group = RequestGroup(
            RequestOutput(request_id, prompt, tokens.tolist(), sampling_params=params,
                          num_truncated_tokens=num_truncated_tokens), self.tokenizer, is_streamed=is_streamed)
        serial = next(self._request_ids)
        for index in range(params.n):
            detokenizer = group.make_detokenizer()
            buffer = np.empty(len(tokens) + min(max_output, 64), np.int32)
            buffer[:len(tokens)] = tokens
            request = Request(
                next(self._request_ids), buffer, len(tokens), params, max_output,
                frozenset() if params.ignore_eos else self._eos_ids, self.namespace(params),
                self._stream(params, serial, index), first_logit if index == 0 else None,
                detokenizer if params.stop else None, constraints[index], self.config.deterministic)
            self.scheduler.add(request)     # all samples have the same prompt: only the first can be refused
            group.add_sample(request, detokenizer)
            self._owner[request.request_id] = group, index
        self._groups[request_id] = group
        return request_id

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> None:
        """Raises the RequestError that `add_request` would raise; queues nothing."""
        params = (params or SamplingParams()).resolved(self._generation_config)
        self._check_grammar(params)
        self.scheduler.check_prompt_fits(len(self._check_prompt(prompt_token_ids, params)))

    def sharing_order(self, prompts: Sequence[Sequence[int] | None],
                      params: Sequence[SamplingParams | None]) -> list[int]:
        """The order in which prompts share most: depth first over their trie, what is cached already first.

        Each cache namespace by itself. Prompts that share nothing, or are no lists of token ids, keep their order.

        Args:
          prompts: token ids; None for one that cannot be read.
          params: of each prompt.
        """
        groups: dict[Namespace | None, list[int]] = {}
        tokens: dict[int, np.ndarray] = {}
        for i, (prompt, given) in enumerate(zip(prompts, params)):
            namespace = self.namespace(given or SamplingParams())
            if namespace is not None and prompt is not None:
                with contextlib.suppress(ValueError, TypeError, OverflowError):
                    tokens[i] = np.array(prompt, np.int32)
            is_list = i in tokens and tokens[i].ndim == 1 and len(tokens[i])
            groups.setdefault(namespace if is_list else None, []).append(i)
        order: list[int] = []
        for namespace, places in groups.items():
            if namespace is not None:
                known = [tokens[i] for i in places]
                cached = [self.cache.num_matching_tokens(prompt, namespace) for prompt in known]
                places = [places[i] for i in depth_first_order(known, cached)]
            order += places
        return order

    def longest_prompt(self, params: SamplingParams | None = None) -> int:
        """Tokens of the longest prompt that can be served with these parameters."""
        needs_output = params is None or params.max_tokens != 0
        return min(self.config.max_model_len - needs_output, self.scheduler.pool_tokens - 1)

    def abort(self, request_id: str) -> None:
        """Ends a request; `step` returns its partial output with finish_reason "abort". Unknown ids are ignored."""
        group = self._groups.get(request_id)
        if group is not None:
            for request in group.samples:
                self.scheduler.abort(request)

    @property
    def has_unfinished(self) -> bool:
        """True while a request runs or waits, or its last output was not returned yet."""
        return bool(self._groups)

    @property
    def num_unfinished(self) -> int:
        return len(self._groups)

    def step(self) -> list[RequestOutput]:
        """Plans and starts one step and takes in the results of the one before.

        Returns:
          Outputs of requests that ended, and of streamed requests that grew.

        Raises:
          EngineError: the device step failed; all running requests are gone (`dropped_outputs` has what they had) and
            the cache is empty, but the engine can be used again. Where not even its state could be made again, it is
            closed, and the message says so.
        """
        self._check_open()
        try:
            if self._grammars is not None and self._grammars.num_in_work and self._grammars.poll():
                self._drop_without_grammar()
            if self._in_flight is not None and self.scheduler.needs_tokens:
                self._num_synchronous_steps += 1
                in_flight, self._in_flight = self._in_flight, None
                self._collect(self._take_in(*in_flight))
            launched = self._launch()
            if self.config.overlap:
                launched, self._in_flight = self._in_flight, launched
            self._collect(self._take_in(*launched) if launched else [])
        except RuntimeError as error:
            self._rebuild()
            raise EngineError(f"the step failed and all running requests were dropped: {error}") from error
        except BaseException:
            self._interrupt()
            raise
        if not self._ready and launched is None and self._in_flight is None and self._groups:
            if self.scheduler.waits_for_age:
                time.sleep(AGE_POLL_S)
                return []
            if self._grammars is not None and self._grammars.num_in_work:
                self._grammars.wait(GRAMMAR_WAIT_S)
                return []
            raise EngineError(f"{len(self._groups)} requests wait and none can run: {self.stats()['pool']}")
        return self._take_ready()

    def take_aborted(self) -> list[RequestOutput]:
        """Outputs of requests that an abort ended, without waiting for the next step."""
        self._collect([])
        return self._take_ready()

    def drop_all(self) -> list[RequestOutput]:
        """Aborts every request and returns the partial outputs."""
        for name in list(self._groups):
            self.abort(name)
        return self.take_aborted()

    # -- the engine as a whole

    def stats(self) -> dict[str, Any]:
        """Counts since the start: pool (pages), tokens, cache, steps, compilations."""
        cache, done, guard = self.cache, self.scheduler.counters, self.scheduler.thrash_guard
        looked_up = cache.counters.num_lookup_tokens
        free = min(pool.num_free for pool in cache.pools)
        in_tree = cache.tree.num_evictable_pages + cache.tree.num_locked_pages
        return dict(
            pool=dict(num_pages=cache.num_pages, page_size=cache.page_size, free=free,
                      cached=cache.tree.num_evictable_pages,
                      in_use=cache.num_pages - free - cache.tree.num_evictable_pages, in_tree=in_tree),
            requests=dict(running=self.scheduler.num_running, waiting=self.scheduler.num_waiting,
                          finished=done.num_finished, preemptions=done.num_preemptions, failures=self._num_failures),
            tokens=dict(computed=done.num_computed_tokens, computed_prompt=done.num_computed_prompt_tokens,
                        cached_prompt=done.num_cached_prompt_tokens, recomputed=done.num_recomputed_tokens,
                        generated=done.num_generated_tokens, forced=done.num_forced_tokens,
                        saved_kv_reads=done.num_saved_kv_reads),
            cache=dict(enabled=cache.enabled, granularity=max(cache.page_size, cache.granularity),
                       lookups=cache.counters.num_lookups,
                       hit_rate=cache.counters.num_hit_tokens / looked_up if looked_up else 0.0,
                       evicted_pages=cache.counters.num_evicted_pages,
                       host_hit_tokens=cache.counters.num_host_hit_tokens,
                       copied_tokens=cache.counters.num_copied_tokens,
                       recomputed_tokens=cache.counters.num_recomputed_tokens,
                       early_evictions=cache.counters.num_early_evictions, eviction_policy=cache.tree.queue.policy,
                       pinned_pages=cache.pins.num_pages, pins=len(cache.pins)),
            host_tier=dict(num_pages=cache.num_host_pages, in_use=cache.tree.num_host_pages,
                           spilled_pages=cache.counters.num_spilled_pages),
            thrash_guard=dict(active=guard.is_active, max_running=guard.limit, recomputed_share=guard.recomputed_share,
                              activations=guard.num_activations),
            steps=done.num_steps, synchronous_steps=self._num_synchronous_steps,
            compiled_programs=self._runner.num_compiled,
            device=f"{self._runner.device.platform}:{self._runner.device.id} ({self._runner.device.device_kind})",
            grammars=dict(compiled=self._grammars.num_compiled if self._grammars else 0,
                          resident=self._grammars.pool.num_resident if self._grammars else 0,
                          in_work=self._grammars.num_in_work if self._grammars else 0),
            host_time=dataclasses.asdict(self.host_time))

    def namespace(self, params: SamplingParams) -> Namespace | None:
        """Where the KV of requests with these parameters is shared; None: nowhere."""
        return self._namespace._replace(salt=params.cache_namespace) if params.cache else None

    def save_cache(self, path: Path, identity: Mapping[str, Any]) -> int:
        """Writes all that is cached, on device and host; returns the number of pages.

        Args:
          identity: fields of `jradix.cache.snapshot.SnapshotIdentity`.

        Raises:
          SnapshotError: the folder cannot be written, or the weights were replaced since the engine was made.
        """
        self._check_open()
        if self._namespace.weights_version:
            raise SnapshotError(f"snapshot {path}: the weights were replaced by update_weights, so a saved cache could "
                                "not be told from one of the checkpoint's; make a new LLM on the new weights to save "
                                "one")
        self._runner.move_pages(self.cache.take_moves())
        tree, pages, host_pages = pack(self.cache)
        with new_snapshot(path, SnapshotIdentity(**identity), tree) as folder:
            self._runner.save_pages(folder, pages, host_pages)
        return pages.shape[1] + host_pages.shape[1]

    def load_cache(self, path: Path, identity: Mapping[str, Any]) -> Unpacked:
        """Adds what `save_cache` wrote, on free pages; says how many pages there were and had room.

        Raises:
          SnapshotError: the snapshot is damaged or of something else; the cache is as it was.
        """
        self._check_open()
        if self._namespace.weights_version:
            raise SnapshotError(f"snapshot {path}: it belongs to the checkpoint's weights, which "
                                "update_weights replaced")
        snapshot = open_snapshot(path, SnapshotIdentity(**identity))
        self._runner.move_pages(self.cache.take_moves())
        return unpack(self.cache, snapshot.tree, lambda rows, pages: self._runner.load_pages(
            snapshot.pages_folder, rows, pages, snapshot.tree.num_rows))

    def update_weights(self, model: Any) -> None:
        """Replaces the weights by those of another model of the same shape; nothing cached before is used again.

        Raises:
          EngineError: requests are running.
        """
        self._check_open()
        num_open = self.scheduler.num_running + self.scheduler.num_waiting
        if num_open:
            raise EngineError(f"{num_open} requests are running with the old weights; wait for them or abort "
                              "them before update_weights")
        self._runner.replace_weights(model)
        self._namespace = self._namespace._replace(weights_version=self._namespace.weights_version + 1)
        self.cache.clear(unpin=True)

    def check_invariants(self) -> None:
        """Recomputes the accounting of slots and pages; raises AssertionError with what differs. For tests."""
        self.scheduler.check_invariants()
        live = {r.request_id for r in self.scheduler.requests()}
        owned = {r.request_id for g in self._groups.values() for r in g.samples if r.state is not RequestState.FINISHED}
        assert live == owned, f"requests without owner or lost: {live ^ owned}"

    def close(self) -> None:
        """Drops all requests and gives back all device memory. Further calls do nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._in_flight = None
            self._groups.clear()
            self._owner.clear()
            if self._grammars is not None:
                self._grammars.close()
            self._runner.close()

    # -- one step

    def _launch(self) -> tuple[StepPlan, StepOutput] | None:
        t0 = time.thread_time()
        self._is_committing = True
        plan = self.scheduler.schedule()
        if plan is None:
            self._is_committing = False
            return None
        t1 = time.thread_time()
        if self._grammars is not None:
            self._upload_grammars()
        if plan.page_moves:
            self._runner.move_pages(plan.page_moves)
        for request in plan.admitted:
            self._prepare_slot(request)
        shape = self._runner.shapes.fit(len(plan.rows), plan.num_tokens, plan.num_decode, is_short=plan.is_short)
        packed, needs = build_step_batch(plan, self._runner.layout(shape), spare_slot=self._runner.spare_slot)
        t2 = time.thread_time()
        output = self._runner.dispatch(packed, shape, num_steps=plan.num_steps, needs_sampling=needs.sampling,
                                       num_logit_rows=needs.num_logit_rows)
        self._is_committing = False
        time_spent = self.host_time
        time_spent.schedule_s += t1 - t0
        time_spent.build_s += t2 - t1
        time_spent.dispatch_s += time.thread_time() - t2
        time_spent.num_rows += len(plan.rows)
        return plan, output

    def _upload_grammars(self) -> None:
        """Puts the grammars of requests that were just admitted on the device."""
        rows, grammars = self._grammars.pool.take_uploads()
        for i, grammar in enumerate(grammars):
            uses_bytes = grammar.token_class is None
            self._runner.upload_grammar(GrammarTables(
                grammar.slot, grammar.state_start, grammar.word_start, rows.ids if i == 0 else rows.ids[:0],
                rows.rows if i == 0 else rows.rows[:0], grammar.state_row, grammar.accepting, grammar.next_state,
                grammar.byte_class.astype(np.uint16) if uses_bytes else grammar.token_class, uses_bytes))

    def _take_in(self, plan: StepPlan, output: StepOutput) -> list[RequestGroup]:
        """Fetches a step's results and books them; returns streamed groups that grew."""
        waited = time.perf_counter()
        tokens = _fetch(output.tokens)
        self.host_time.wait_s += time.perf_counter() - waited
        started = time.thread_time()
        if output.prompt is not None:
            self._take_prompt_logprobs(plan, _fetch(output.prompt))
        logprobs = None
        grown: list[RequestGroup] = []
        for i, request, new_tokens in self.scheduler.update(plan, tokens):
            group, index = self._owner[request.request_id]
            if request.params.logprobs is not None:
                logprobs = logprobs or _fetch(output.sampled)
                group.add_logprobs(index, new_tokens, logprobs, i)
            if group.is_streamed:
                group.stream(index, new_tokens)
                grown.append(group)
        self.host_time.output_s += time.thread_time() - started
        return grown

    def _collect(self, grown: list[RequestGroup]) -> None:
        """Makes outputs ready: ended requests completed, streamed ones as they are."""
        started = time.thread_time()
        for request in self.scheduler.take_ended():
            group, index = self._owner.pop(request.request_id)
            group.complete(index)
            if not any(sample.request_id in self._owner for sample in group.samples):
                group.finish()
                self._ready[group.output.request_id] = group.output
                del self._groups[group.output.request_id]
        for group in grown:
            self._ready.setdefault(group.output.request_id, group.output)
        self.host_time.output_s += time.thread_time() - started

    def _take_ready(self) -> list[RequestOutput]:
        ready, self._ready = self._ready, {}
        return list(ready.values())

    def _take_prompt_logprobs(self, plan: StepPlan, found: TokenLogprobs) -> None:
        """Hands out the log-probabilities inside prompts, in the order `build_step_batch` asked for them."""
        place = 0
        for row in plan.rows:
            first, last = row.logit_span
            owner = self._owner.get(row.request.request_id)
            for position in range(first, last):
                if owner is not None:
                    owner[0].add_prompt_logprob(position + 1, found, place)
                place += 1

    def _prepare_slot(self, request: Request) -> None:
        """Writes a request's history to its slot's device state, where it or the slot's last owner needs that."""
        if request.has_device_state or request.slot in self._dirty_slots:
            self._runner.set_history(request.slot, prompt_ids=request.tokens[:request.num_prompt],
                                     output_ids=request.tokens[request.num_prompt:request.num_tokens],
                                     logit_bias=request.params.logit_bias or {})
            self._dirty_slots.discard(request.slot)
            if request.params.logit_bias:
                self._dirty_slots.add(request.slot)

    # -- checks and failures

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed; make a new one")

    def _check_prompt(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> np.ndarray:
        try:
            tokens = np.asarray(prompt_token_ids)
        except ValueError as error:
            raise RequestError(f"prompt token ids: {error}; expected a flat list of integers") from None
        if tokens.size == 0:
            raise RequestError("empty prompt: expected at least one token")
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise RequestError(f"prompt token ids of shape {tokens.shape} and type {tokens.dtype}: expected a flat "
                               "list of integers")
        vocab = self._runner.num_valid_tokens
        if tokens.min() < 0 or tokens.max() >= vocab:
            bad = int(tokens[(tokens < 0) | (tokens >= vocab)][0])
            raise RequestError(f"token id {bad} is outside the vocabulary of {vocab}")
        longest = self.config.max_model_len - (params.max_tokens != 0)
        if len(tokens) > longest:
            raise RequestError(f"prompt of {len(tokens)} tokens, but max_model_len={self.config.max_model_len} leaves "
                               f"room for {longest}; shorten the prompt or raise max_model_len")
        outside = [i for i in (*params.stop_token_ids, *(params.logit_bias or ())) if i >= vocab]
        if outside:
            raise RequestError(f"stop_token_ids or logit_bias name token id {outside[0]}, outside the "
                               f"vocabulary of {vocab}")
        num_stop_ids = len(self._eos_ids | set(params.stop_token_ids))
        if params.min_tokens and num_stop_ids > NUM_STOP_IDS:
            raise RequestError(f"min_tokens with {num_stop_ids} stop token ids: at most "
                               f"{NUM_STOP_IDS} can be held back")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids")
        return tokens.astype(np.int32)

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        """The grammar a request asks for. Raises RequestError when it is known that it cannot be used."""
        with _as_request_error():
            sources = self._grammar_sources(params)
            jumps = self.config.jump_decoding and params.logprobs is None
            return sources and self._grammars.constraint(sources, jumps=jumps, must_end=params.max_tokens == ENOUGH,
                                                         stop_ids=frozenset(params.stop_token_ids),
                                                         is_idle=not self._groups)

    def _check_grammar(self, params: SamplingParams) -> None:
        """Raises RequestError when the grammar cannot be used; waits for it to be compiled."""
        with _as_request_error():
            if sources := self._grammar_sources(params):
                self._grammars.check(sources, must_end=params.max_tokens == ENOUGH)

    def _grammar_sources(self, params: SamplingParams) -> dict[str, Any] | None:
        """Arguments of `compile_grammar`; None without a grammar. Raises GrammarError or RequestError."""
        sources = params.grammar_sources
        if not sources:
            return None
        if self._grammars is None:
            raise RequestError(f"{next(iter(sources))}: grammars need a tokenizer whose tokens are bytes, "
                               "and grammar_bytes")
        if "json_schema" in sources:
            sources["json_schema"] = read_schema(sources["json_schema"])
        return sources

    def _drop_without_grammar(self) -> None:
        """Ends the requests whose grammar turned out to be unusable, each with the reason."""
        for request in list(self.scheduler.requests()):
            if request.constraint is not None and request.constraint.error is not None:
                self._owner[request.request_id][0].output.error = str(request.constraint.error)
                self.scheduler.abort(request, "error")

    def _stream(self, params: SamplingParams, serial: int, index: int) -> tuple[int, int]:
        """Two signed 32-bit words that name the random stream of one sample."""
        source = f"request {params.seed}" if params.seed is not None else f"engine {self._seed} {serial}"
        digest = hashlib.blake2b(f"{source} {index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)

    def _interrupt(self) -> None:
        """After an interrupt: drops all requests; keeps the cache unless the interrupt came at a bad moment."""
        if self._is_committing or not self._runner.is_intact or self._is_inconsistent():
            self._rebuild()
        else:
            self._in_flight = None
            for request in list(self.scheduler.requests()):
                self.scheduler.abort(request)
            self.scheduler.take_ended()
            self._drop_groups()

    def _is_inconsistent(self) -> bool:
        try:
            self.check_invariants()
        except AssertionError:
            return True
        return False

    def _rebuild(self) -> None:
        """Drops all requests and starts over with an empty cache and fresh device state."""
        self._num_failures += 1
        self._in_flight = None
        self._is_committing = False
        self._drop_groups()
        self._dirty_slots.clear()
        try:
            self._runner.reset_state()
        except RuntimeError as error:
            self.close()
            raise EngineError(f"the step failed, and so did making its state again: {error}; the engine is closed, "
                              "make a new one") from error
        counters, cache_counters = self.scheduler.counters, self.cache.counters
        self._reset_scheduler()
        self.scheduler.counters, self.cache.counters = counters, cache_counters

    def _drop_groups(self) -> None:
        """Ends every request as it is; what they have, and what was ready to return, becomes `dropped_outputs`."""
        for name, group in self._groups.items():
            for index, request in enumerate(group.samples):
                request.finish_reason = request.finish_reason or "abort"
                if request.finished_s is None:
                    request.finished_s = self._clock()
                group.complete(index)
            group.finish()
            self._ready[name] = group.output
        self.dropped_outputs = self._take_ready()
        self._groups.clear()
        self._owner.clear()

    def _reset_scheduler(self) -> None:
        self.cache = PrefixCache.create(
            page_size=self.config.page_size, num_pages=self.config.num_pages, max_pages=self.config.max_pages_per_seq,
            num_groups=self._runner.num_groups, enabled=self.config.enable_prefix_caching,
            num_host_pages=self.config.num_host_pages, eviction_policy=self.config.eviction_policy,
            min_ttl_s=self.config.min_ttl_s, max_pinned_fraction=self.config.max_pinned_fraction, clock=self._clock,
            granularity=self.config.hit_granularity)
        self.scheduler = Scheduler(self.config, self.cache, shapes=self._runner.shapes,
                                   sharing=self._runner.sharing_cost, clock=self._clock)
        if self._grammars is not None:
            self._grammars.reset()


def _check_sizes(config: EngineConfig, runner: EngineConfig) -> None:
    """Refuses what lies beyond the device's arrays: there a page id or slot would be clamped or dropped in silence."""
    if config.page_size != runner.page_size:
        raise ValueError(f"page_size={config.page_size}, but the runner was made with {runner.page_size}")
    for name in ("num_pages", "num_host_pages", "max_num_seqs", "max_pages_per_seq", "prefill_chunk_tokens"):
        if getattr(config, name) > getattr(runner, name):
            raise ValueError(f"{name}={getattr(config, name)}, but the runner was made with {getattr(runner, name)}; "
                             "expected at most that")
    if (config.deterministic, config.hit_granularity) != (runner.deterministic, runner.hit_granularity):
        raise ValueError(f"deterministic={config.deterministic}, prefill_chunk_tokens={config.prefill_chunk_tokens}, but "
                         f"the runner was made with {runner.deterministic}, {runner.prefill_chunk_tokens}; expected the "
                         "same, since the shapes of its steps follow from them")
    if config.shared_attention and not runner.shared_attention:
        raise ValueError("shared_attention=True, but the runner was made without it; its steps have no room for groups")


@contextlib.contextmanager
def _as_request_error() -> Iterator[None]:
    try:
        yield
    except GrammarError as error:
        raise RequestError(str(error)) from error


def _fetch(arrays: Any) -> Any:
    """Device to host. The only place where the host waits for the device."""
    if isinstance(arrays, TokenLogprobs):
        return TokenLogprobs(*(np.asarray(a) for a in arrays))
    return np.asarray(arrays)
