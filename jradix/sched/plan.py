"""What one step will do, as the scheduler decided it, and its translation into the arrays of a `StepBatch`."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jradix.batch import NUM_STOP_IDS, PackedBatch, PageMove, RowParams, StepBatch, StepLayout
from jradix.config import SHARED_MEMBERS, SHORT_TOKENS
from jradix.sched.request import Request

NO_TOKEN = 2**30   # pads lists of token ids; beyond every vocabulary


@dataclass(slots=True)
class Row:
    """One request's part of a step.

    Attributes:
      request: whose tokens.
      start: position of the first token.
      num_tokens: tokens run in this step (1 for decode).
      slot: its row of the per-slot device state (the request may have lost it when the results arrive).
      num_samples: tokens sampled: 0 inside a prompt, else 1, or up to k in a multi-step decode.
      is_input_on_device: the input token was sampled by a step whose results are not known yet.
      output_position: number of the first output token sampled.
      first_logit: first prompt position whose logits are wanted, None for none.
    """
    request: Request
    start: int
    num_tokens: int
    slot: int
    num_samples: int
    is_input_on_device: bool
    output_position: int
    first_logit: int | None = None

    @property
    def logit_span(self) -> tuple[int, int]:
        """Prompt positions [first, last) of this row whose logits are wanted; the last prompt token predicts none."""
        if self.first_logit is None:
            return 0, 0
        first = max(self.first_logit, self.start)
        return first, max(first, min(self.start + self.num_tokens, self.request.num_prompt - 1))


class SharedRows(NamedTuple):
    """Rows whose contexts begin with the same pages, and whose attention reads these together.

    Attributes:
      num_pages: pages of the prefix.
      rows: their places in the plan.
    """
    num_pages: int
    rows: list[int]


@dataclass(slots=True)
class StepPlan:
    """Rows of one step, decode rows first, and what must happen before it.

    Attributes:
      rows: at most max_num_seqs.
      num_decode: leading rows with exactly one token.
      num_steps: decode steps inside the call.
      page_moves: page contents to copy before the step, in order.
      admitted: requests whose device state is set before the step runs: they got a slot in this step, or have tokens
        that the device did not draw.
      num_prefill_tokens: tokens of prefill rows, for the statistics.
      shared: groups of rows with a common prefix, no row in two of them.
    """
    rows: list[Row]
    num_decode: int
    num_steps: int = 1
    page_moves: list[PageMove] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    num_prefill_tokens: int = 0
    shared: list[SharedRows] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_short(self) -> bool:
        """No row is too long for a short step."""
        return all(row.num_tokens <= SHORT_TOKENS for row in self.rows)


class StepNeeds(NamedTuple):
    """What a step needs beside the forward pass and the most probable token of each row.

    Attributes:
      sampling: a row draws, is adjusted, or wants log-probabilities.
      num_logit_rows: positions inside prompts whose log-probabilities are wanted.
    """
    sampling: bool
    num_logit_rows: int


def build_step_batch(plan: StepPlan, layout: StepLayout, *, spare_slot: int) -> tuple[PackedBatch, StepNeeds]:
    """Fills the arrays of one step.

    Args:
      layout: of a shape that `plan` fits into.
      spare_slot: the slot that padding rows write to.
    """
    needs_sampling = plan.num_steps > 1 or any(
        row.num_samples and not _takes_best(row.request, row.output_position) for row in plan.rows)
    wants_logits = any(row.first_logit is not None for row in plan.rows)
    masks = {i: mask for i, row in enumerate(plan.rows) if row.num_samples and row.request.constraint is not None
             and (mask := row.request.constraint.mask()) is not None}
    packed = layout.allocate(with_params=needs_sampling, with_logit_rows=wants_logits, with_masks=bool(masks))
    batch = layout.step_batch(packed.ints)
    if needs_sampling:
        params = layout.row_params(packed.row_ints, packed.row_floats)
        _fill_params(plan, params)
        for place, (i, mask) in enumerate(masks.items(), 1):
            packed.row_masks[place - 1] = mask
            params.mask_places[i] = place
    batch.row_slots.fill(spare_slot)
    batch.token_src.fill(-1)
    num_logit_rows = position = 0
    for i, row in enumerate(plan.rows):
        request, n, lease = row.request, row.num_tokens, row.request.lease
        if row.is_input_on_device:
            batch.token_src[i] = row.slot
        else:
            batch.tokens[position:position + n] = request.tokens[row.start:row.start + n]
        batch.cu_q_lens[i] = position
        batch.kv_lens[i] = row.start + n
        batch.page_table[:, i, :lease.num_pages] = lease.page_table[:, :lease.num_pages]
        batch.row_slots[i] = row.slot
        if row.first_logit is not None:
            first, last = row.logit_span
            places = slice(num_logit_rows, num_logit_rows + last - first)
            packed.logit_rows[places] = np.arange(position + first - row.start, position + last - row.start)
            packed.logit_targets[places] = request.tokens[first + 1:last + 1]
            num_logit_rows += last - first
        if row.num_samples:
            batch.is_sampled[i] = 1
        position += n
    batch.cu_q_lens[len(plan.rows):] = position
    batch.num_decode[0] = plan.num_decode
    _fill_shared(plan, layout, batch)
    return packed, StepNeeds(needs_sampling, num_logit_rows)


def _fill_shared(plan: StepPlan, layout: StepLayout, batch: StepBatch) -> None:
    """Groups in parts of `SHARED_MEMBERS` queries; in a short step each token of a row is a query."""
    part = 0
    batch.shared_members.fill(layout.shape.num_tokens)
    for group in plan.shared:
        queries = [i for i in group.rows if i < plan.num_decode]
        if layout.shape.is_short:
            queries = [token for i in group.rows for token in range(batch.cu_q_lens[i], batch.cu_q_lens[i + 1])]
        for start in range(0, len(queries), SHARED_MEMBERS):
            members = queries[start:start + SHARED_MEMBERS]
            if len(members) > 1:
                batch.shared_members[part, :len(members)] = members
                batch.shared_lens[part] = group.num_pages * layout.page_size
                part += 1


def _takes_best(request: Request, output_position: int) -> bool:
    """True when the most probable token is all that is asked for."""
    params = request.params
    return (params.is_greedy and params.logprobs is None and output_position >= params.min_tokens
            and not request.has_device_state and request.constraint is None)


def _fill_params(plan: StepPlan, chosen: RowParams) -> None:
    """Sampling parameters of the rows that are sampled; neutral ones for the others."""
    chosen.top_p.fill(1.0)
    chosen.repetition_penalty.fill(1.0)
    chosen.stop_ids.fill(NO_TOKEN)
    for i, row in enumerate(plan.rows):
        if row.num_samples == 0:
            continue
        request, params = row.request, row.request.params
        chosen.output_positions[i] = row.output_position
        chosen.tokens_left[i] = row.num_samples
        chosen.min_tokens[i] = params.min_tokens
        chosen.seeds[i] = request.seed
        if request.constraint is not None:      # -1: the device knows, after a token that the host does not know yet
            chosen.grammar_states[i] = -1 if row.is_input_on_device else request.constraint.device_state
        chosen.wants_logprobs[i] = params.logprobs is not None
        if not params.is_greedy:
            chosen.temperature[i] = params.temperature
            chosen.top_p[i] = params.top_p
            chosen.min_p[i] = params.min_p
            chosen.top_k[i] = params.top_k
        if request.has_device_state:
            chosen.uses_history[i] = 1
            chosen.presence_penalty[i] = params.presence_penalty
            chosen.frequency_penalty[i] = params.frequency_penalty
            chosen.repetition_penalty[i] = params.repetition_penalty
        ids = sorted(request.stop_ids)[:NUM_STOP_IDS]
        chosen.stop_ids[i, :len(ids)] = ids
