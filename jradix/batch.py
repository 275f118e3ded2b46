"""The bridge between scheduler and device: the arrays of one step, packed into two buffers. NumPy only.

S rows, T flat tokens, M pages per row, G KV groups, K = T rounded up to `LOGIT_BLOCK` (places for prompt logits).
Rows are ordered decode first (one token each), then prefill chunks; their tokens lie one after the other in `tokens`,
padding at the end. Positions and KV slots follow from `cu_q_lens`, `kv_lens` and `page_table`, so the step derives them.
"""
from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jradix.config import StepShape

NUM_STOP_IDS = 32   # stop token ids per row that the step knows
LOGIT_BLOCK = 32    # prompt positions whose logits are computed together


class StepBatch(NamedTuple):
    """Inputs of one step; NumPy views on the host, traced arrays on the device.

    Attributes:
      tokens: int32[T] token ids.
      token_src: int32[S], for a decode row whose input is still on the device: its row slot; else -1.
      cu_q_lens: int32[S + 1], first flat token of each row; padding rows are empty.
      kv_lens: int32[S], KV length of each row including this step's tokens; 0 for padding rows.
      page_table: int32[G, S, M] page ids, the scratch page beyond a row's pages.
      row_slots: int32[S], each row's place in the per-slot device state; the extra last slot for padding rows.
      is_sampled: int32[S], 1 where the row's last token is followed by a sampled one.
      output_positions: int32[S], number of the output token being drawn.
      tokens_left: int32[S], output tokens the row may still produce (multi-step decode).
      min_tokens: int32[S], stop ids are suppressed while output_positions < min_tokens.
      stop_ids: int32[S, NUM_STOP_IDS], padded with a number no token has.
      top_k: int32[S].
      seeds: int32[S, 2], bit patterns of the row's random stream.
      logit_rows: int32[K], flat tokens whose log-probabilities are wanted (prompt_logprobs, score).
      logit_targets: int32[K], the token each of them should predict.
      counts: int32[5], number of decode rows, number of logit_rows, then flags: any row draws or is adjusted, any row
        wants log-probabilities, any stop ids matter.
      temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty: float32[S].
    """
    tokens: Any
    token_src: Any
    cu_q_lens: Any
    kv_lens: Any
    page_table: Any
    row_slots: Any
    is_sampled: Any
    output_positions: Any
    tokens_left: Any
    min_tokens: Any
    stop_ids: Any
    top_k: Any
    seeds: Any
    logit_rows: Any
    logit_targets: Any
    counts: Any
    temperature: Any
    top_p: Any
    min_p: Any
    presence_penalty: Any
    frequency_penalty: Any
    repetition_penalty: Any


class PackedBatch(NamedTuple):
    """The two buffers that cross to the device. Never written again once dispatched: a CPU step reads them in place."""
    ints: np.ndarray
    floats: np.ndarray


class StepLayout:
    """Where each field of a `StepBatch` lies in the buffers, for one step shape."""

    def __init__(self, shape: StepShape, *, num_groups: int, max_pages: int):
        self.shape = shape
        rows, tokens = shape.num_rows, shape.num_tokens
        logits = -(-tokens // LOGIT_BLOCK) * LOGIT_BLOCK
        self.num_logit_rows = logits
        self._ints: dict[str, tuple[int, ...]] = dict(
            tokens=(tokens,), token_src=(rows,), cu_q_lens=(rows + 1,), kv_lens=(rows,),
            page_table=(num_groups, rows, max_pages), row_slots=(rows,), is_sampled=(rows,), output_positions=(rows,),
            tokens_left=(rows,), min_tokens=(rows,), stop_ids=(rows, NUM_STOP_IDS), top_k=(rows,), seeds=(rows, 2),
            logit_rows=(logits,), logit_targets=(logits,), counts=(5,))
        self._floats: dict[str, tuple[int, ...]] = {
            name: (rows,) for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                                       "repetition_penalty")}

    @cached_property
    def num_ints(self) -> int:
        return sum(math.prod(shape) for shape in self._ints.values())

    @cached_property
    def num_floats(self) -> int:
        return sum(math.prod(shape) for shape in self._floats.values())

    def allocate(self) -> tuple[StepBatch, PackedBatch]:
        """Fresh zeroed buffers and the batch as views of them."""
        packed = PackedBatch(np.zeros(self.num_ints, np.int32), np.zeros(self.num_floats, np.float32))
        return self.unpack(packed), packed

    def unpack(self, packed: PackedBatch) -> StepBatch:
        """Cuts the buffers into fields; works on NumPy and on traced arrays."""
        return StepBatch(**_cut(packed.ints, self._ints), **_cut(packed.floats, self._floats))


def _cut(buffer: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    fields, offset = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        fields[name] = buffer[offset:offset + size].reshape(shape)
        offset += size
    return fields
