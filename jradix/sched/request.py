"""One sequence of tokens on its way through the engine. It holds state; the scheduler moves it."""
from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol, Sequence

import numpy as np

from jradix.cache.node import Namespace
from jradix.cache.prefix_cache import Lease
from jradix.outputs import CacheUse
from jradix.sampling_params import SamplingParams


class RequestState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Constraint(Protocol):
    """What the scheduler asks of a request's grammar.

    Attributes:
      is_ready: it is compiled; until then the request waits.
      forced_token: the token that must come next, or -1; -1 also where the request does not jump.
      needs_token: the token being drawn must be known before the step after it is planned.
      is_accepting: the text is complete.
      is_finished: it is complete and nothing can follow it.
      engine: what follows the grammar, in `CompletionOutput.grammar`'s words.
    """
    is_ready: bool
    forced_token: int
    needs_token: bool
    is_accepting: bool
    is_finished: bool
    engine: str

    def try_acquire(self) -> bool: ...

    def release(self) -> None: ...

    def advance(self, token: int) -> None: ...

    @property
    def device_state(self) -> int: ...

    def mask(self) -> np.ndarray | None: ...


class StopSearch(Protocol):
    """What the scheduler asks of a detokenizer: does the text of these tokens contain a stop string?"""

    def push(self, token_ids: Sequence[int]) -> str | None: ...


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and one sample of it.

    The tokens as a ruler, `num_tokens` of them known to the host:

        [0, num_prompt) prompt | [num_prompt, num_tokens) output | num_in_flight sampled, still on the device
        [0, num_computed) their KV is written, or will be by a step already dispatched

    Attributes:
      request_id: the engine's own number, in order of arrival; unique for its lifetime.
      tokens: int32 buffer, the first `num_tokens` entries valid.
      params: sampling parameters with all defaults filled in.
      max_output: output tokens at most, from max_tokens and the model's length limit.
      eos_ids: end tokens of the model, empty with ignore_eos.
      seed: two 32-bit words that name the random stream.
      namespace: where its KV may be shared; None: nowhere.
      first_logit: first prompt position whose logits are wanted; None: only the last.
      constraint: the grammar its output follows; held on the device while it runs.
      replays: what a preemption gave up of its output is computed again one token a step, as it was the first time.
      slot: row of the per-slot device state while it runs.
      cache_use: what was found in the cache when it was first admitted; None before.
      young_since_s: since when only pages younger than min_ttl_s could make room for it; None: not so.
      num_passed_over: times a later request was admitted before it.
      num_skipped_steps: steps since it jumped that had no room for its tokens.
      num_forced: output tokens that were appended because nothing else could follow.
      num_reported: output tokens that `Scheduler.update` has returned.
      num_lost: tokens whose KV a preemption gave up.
    """
    request_id: int
    tokens: np.ndarray
    num_prompt: int
    params: SamplingParams
    max_output: int
    eos_ids: frozenset[int] = frozenset()
    namespace: Namespace | None = Namespace()
    seed: tuple[int, int] = (0, 0)
    first_logit: int | None = None
    stop_search: StopSearch | None = None
    constraint: Constraint | None = None
    replays: bool = False
    state: RequestState = RequestState.WAITING
    num_tokens: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    slot: int = -1
    lease: Lease | None = None
    cache_use: CacheUse | None = None
    young_since_s: float | None = None
    num_computed_prompt: int = 0
    num_preemptions: int = 0
    num_passed_over: int = 0
    num_skipped_steps: int = 0
    num_forced: int = 0
    num_reported: int = 0
    num_lost: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    arrival_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt
        self.stop_ids = self.eos_ids | frozenset(self.params.stop_token_ids)

    @property
    def longest_hit(self) -> int | None:
        """Tokens that may come from the cache at most; None: all but the last."""
        if self.first_logit is None and self.replays:
            return self.num_prompt - 1      # output was not computed as a prompt is
        return self.first_logit

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt:self.num_tokens].tolist()

    @property
    def known_tokens(self) -> np.ndarray:
        return self.tokens[:self.num_tokens]

    @property
    def num_left(self) -> int:
        """Output tokens that may still be scheduled."""
        return self.max_output - self.num_output - self.num_in_flight

    @property
    def num_pending(self) -> int:
        """Tokens, in flight ones included, whose KV is not scheduled yet."""
        return self.num_tokens + self.num_in_flight - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        """True while prompt tokens (or, after preemption, output tokens) remain to compute before the next sample."""
        if self.replays:
            return self.num_computed < self.num_prompt
        return self.num_computed < self.num_tokens - 1 or (self.num_computed < self.num_tokens and
                                                           self.num_tokens == self.num_prompt)

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens found in the cache when it was first admitted; None before."""
        return None if self.cache_use is None else self.cache_use.num_cached_tokens

    @property
    def has_device_state(self) -> bool:
        """True when penalties or a bias need this request's row of the per-slot device state."""
        p = self.params
        return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0 or p.logit_bias)

    def append(self, token: int) -> None:
        """Adds one sampled token."""
        if self.num_tokens == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(max(len(self.tokens) // 2, 64), np.int32)])
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
