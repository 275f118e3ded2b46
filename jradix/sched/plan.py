"""What one step will do, as the scheduler decided it, and its translation into the arrays of a `StepBatch`."""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jradix.batch import NUM_STOP_IDS, PackedBatch, StepBatch, StepLayout
from jradix.cache.pages import SCRATCH_PAGE
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


@dataclass(slots=True)
class StepPlan:
    """Rows of one step, decode rows first, and what must happen before it.

    Attributes:
      rows: at most max_num_seqs.
      num_decode: leading rows with exactly one token.
      num_steps: decode steps inside the call.
      admitted: requests that got a slot in this step; their device state is set before the step runs.
      num_prefill_tokens: tokens of prefill rows, for the statistics.
    """
    rows: list[Row]
    num_decode: int
    num_steps: int = 1
    admitted: list[Request] = field(default_factory=list)
    num_prefill_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


def build_step_batch(plan: StepPlan, layout: StepLayout, *, spare_slot: int) -> tuple[StepBatch, PackedBatch]:
    """Fills the arrays of one step.

    Args:
      layout: of a shape that `plan` fits into.
      spare_slot: the slot that padding rows write to.
    """
    batch, packed = layout.allocate()
    batch.page_table.fill(SCRATCH_PAGE)
    batch.row_slots.fill(spare_slot)
    batch.token_src.fill(-1)
    batch.top_p.fill(1.0)
    batch.repetition_penalty.fill(1.0)
    batch.stop_ids.fill(NO_TOKEN)
    needs_sampler = wants_logprobs = needs_stops = False
    num_logit_rows = position = 0
    for i, row in enumerate(plan.rows):
        request, n = row.request, row.num_tokens
        params, lease = request.params, request.lease
        if row.is_input_on_device:
            batch.token_src[i] = row.slot
        else:
            batch.tokens[position:position + n] = request.tokens[row.start:row.start + n]
        batch.cu_q_lens[i] = position
        batch.kv_lens[i] = row.start + n
        batch.page_table[:, i, :lease.num_pages] = lease.page_table[:, :lease.num_pages]
        batch.row_slots[i] = row.slot
        first, last = row.logit_span
        if first < last:
            rows = slice(num_logit_rows, num_logit_rows + last - first)
            batch.logit_rows[rows] = np.arange(position + first - row.start, position + last - row.start)
            batch.logit_targets[rows] = request.tokens[first + 1:last + 1]
            num_logit_rows += last - first
        position += n
        if row.num_samples == 0:
            continue
        batch.is_sampled[i] = 1
        batch.output_positions[i] = row.output_position
        batch.tokens_left[i] = row.num_samples
        batch.temperature[i] = params.temperature
        batch.seeds[i] = request.seed
        if not params.is_greedy:
            batch.top_p[i] = params.top_p
            batch.min_p[i] = params.min_p
            batch.top_k[i] = params.top_k
            needs_sampler = True
        elif params.top_k == 1:
            batch.temperature[i] = 0.0
        if request.has_device_state:
            batch.presence_penalty[i] = params.presence_penalty
            batch.frequency_penalty[i] = params.frequency_penalty
            batch.repetition_penalty[i] = params.repetition_penalty
            needs_sampler = True
        if row.output_position < params.min_tokens:
            batch.min_tokens[i] = params.min_tokens
            needs_sampler = True
        if request.stop_ids and (plan.num_steps > 1 or row.output_position < params.min_tokens):
            ids = sorted(request.stop_ids)[:NUM_STOP_IDS]
            batch.stop_ids[i, :len(ids)] = ids
            needs_stops = True
        wants_logprobs |= params.logprobs is not None
    batch.cu_q_lens[len(plan.rows):] = position
    batch.counts[:] = (plan.num_decode, num_logit_rows, needs_sampler, wants_logprobs, needs_stops)
    return batch, packed
