"""The bridge between scheduler and device: the arrays of one step, packed into few buffers. NumPy only.

S rows, T flat tokens, M pages per row, G KV groups, W places for prompt logits.
Rows are ordered decode first (one token each), then prefill chunks; their tokens lie one after the other in `tokens`,
padding at the end. Positions and KV slots follow from `cu_q_lens`, `kv_lens` and `page_table`, so the step derives
them.
"""
from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple

import numpy as np

from jradix.config import SHARED_MEMBERS, StepShape

NUM_STOP_IDS = 32   # stop token ids per row that the step knows
LOGIT_BLOCK = 32    # prompt positions whose logits are computed together


class StepBatch(NamedTuple):
    """Inputs of the forward pass; NumPy views on the host, traced arrays on the device.

    Attributes:
      tokens: int32[T] token ids.
      token_src: int32[S], for a decode row whose input is still on the device: its row slot; else -1.
      cu_q_lens: int32[S + 1], first flat token of each row; padding rows are empty.
      kv_lens: int32[S], KV length of each row including this step's tokens; 0 for padding rows.
      page_table: int32[G, S, M] page ids, the scratch page beyond a row's pages.
      row_slots: int32[S], each row's place in the per-slot device state; the extra last slot for padding rows.
      is_sampled: int32[S], 1 where the row's last token is followed by a sampled one.
      num_decode: int32[1], leading rows with exactly one token.
      shared_lens: int32[P], tokens of the prefix that the queries of a part read together, whole pages; 0: no part.
      shared_members: int32[P, SHARED_MEMBERS], these queries: rows, in a short step flat tokens; padded with T.
    """
    tokens: Any
    token_src: Any
    cu_q_lens: Any
    kv_lens: Any
    page_table: Any
    row_slots: Any
    is_sampled: Any
    num_decode: Any
    shared_lens: Any
    shared_members: Any


class RowParams(NamedTuple):
    """How each row is sampled.

    Attributes:
      output_positions: int32[S], number of the output token being drawn.
      tokens_left: int32[S], output tokens the row may still produce (multi-step decode).
      min_tokens: int32[S], stop ids are suppressed while output_positions < min_tokens.
      stop_ids: int32[S, NUM_STOP_IDS], padded with a number no token has.
      top_k: int32[S].
      seeds: int32[S, 2], bit patterns of the row's random stream.
      grammar_states: int32[S], the state whose tokens may be drawn, 0 for a row without grammar; -1: as the device
        remembers it for the row's slot, after the token sampled by the step before.
      mask_places: int32[S], 1 + the row's place in the `row_masks` of the step, 0 for none; not in multi-step decode.
      uses_history: int32[S], 1 where penalties or a bias apply.
      wants_logprobs: int32[S], 1 where log-probabilities are asked for; they are zeros in a step where nobody does.
      temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty: float32[S].
    """
    output_positions: Any
    tokens_left: Any
    min_tokens: Any
    stop_ids: Any
    top_k: Any
    seeds: Any
    grammar_states: Any
    mask_places: Any
    uses_history: Any
    wants_logprobs: Any
    temperature: Any
    top_p: Any
    min_p: Any
    presence_penalty: Any
    frequency_penalty: Any
    repetition_penalty: Any


class TokenLogprobs(NamedTuple):
    """Log-probabilities at n positions (or [steps, rows]), from the raw logits.

    Attributes:
      logprob: float32[n], of one token at each position.
      rank: int32[n], its rank, 1 is the most probable.
      top_ids: int32[n, MAX_LOGPROBS], the most probable tokens, best first.
      top_logprobs: float32[n, MAX_LOGPROBS].
    """
    logprob: Any
    rank: Any
    top_ids: Any
    top_logprobs: Any


class PackedBatch(NamedTuple):
    """The buffers that cross to the device. Never written again once dispatched: a CPU step reads them in place.

    Attributes:
      ints: a `StepBatch`; its length depends on the whole step shape.
      row_ints, row_floats: a `RowParams`; their lengths depend on the number of rows only.
      logit_rows: int32[W], flat tokens whose log-probabilities are wanted (prompt_logprobs, score).
      logit_targets: int32[W], the token each of them should predict.
      row_masks: uint32[S, ceil(V / 32)], planar bits of the tokens allowed, for rows that bring their own mask; empty
        where no row does.
    """
    ints: np.ndarray
    row_ints: np.ndarray
    row_floats: np.ndarray
    logit_rows: np.ndarray
    logit_targets: np.ndarray
    row_masks: np.ndarray


class GrammarTables(NamedTuple):
    """The tables of one grammar, and where they go in the device's arena of `GrammarSizes`.

    A state is numbered inside the grammar here; on the device, `first_state` is added.

    Attributes:
      grammar: place of the grammar, from 1.
      first_state, first_transition: where its Q states and its Q * C transitions go.
      row_ids: int32[n], places of the mask rows that are not there yet.
      mask_rows: uint32[n, ceil(V / 32)], their bits: token v is bit v // W of word v % W.
      state_row: int32[Q], place of each state's mask row.
      is_accepting: bool[Q], the text may end here.
      next_state: uint16[Q, C], 65,535 rejects.
      classes: uint16[V], class of each token; with `uses_bytes` uint16[256], of each byte of a token.
      uses_bytes: transitions are made byte by byte.
    """
    grammar: int
    first_state: int
    first_transition: int
    row_ids: np.ndarray
    mask_rows: np.ndarray
    state_row: np.ndarray
    is_accepting: np.ndarray
    next_state: np.ndarray
    classes: np.ndarray
    uses_bytes: bool = False


class MoveKind(enum.Enum):
    """From where to where a page's content goes."""
    COPY = "device to device"
    OUT = "device to host"
    IN = "host to device"


class PageMove(NamedTuple):
    """Pages whose content is to be copied before a step; the source keeps its own.

    The moves of a list happen in order, each as if alone; a move of n pages is n moves of one page. Page ids of the
    device and of the host both start at 1.

    Attributes:
      kind: which side `source` and `target` are on.
      source: int32[G, n] page ids, by KV group.
      target: int32[G, n] page ids.
    """
    kind: MoveKind
    source: np.ndarray
    target: np.ndarray


class StepLayout:
    """Where each field lies in the buffers, for one step shape.

    Args:
      shape: S rows and C chunk tokens.
      num_groups: G.
      max_pages: M.
      page_size: tokens of a page.
      num_logit_rows: W, a multiple of LOGIT_BLOCK and at least the T of the engine's largest shape.
      vocab_size: V, width of the head.
      shared_attention: there is room for groups of rows with a common prefix.
    """

    def __init__(self, shape: StepShape, *, num_groups: int, max_pages: int, page_size: int, num_logit_rows: int,
                 vocab_size: int, shared_attention: bool = True):
        self.shape = shape
        self.page_size = page_size
        rows, num_parts = shape.num_rows, shape.num_shared_parts if shared_attention else 0
        self._ints: dict[str, tuple[int, ...]] = dict(
            tokens=(shape.num_tokens,), token_src=(rows,), cu_q_lens=(rows + 1,), kv_lens=(rows,),
            page_table=(num_groups, rows, max_pages), row_slots=(rows,), is_sampled=(rows,), num_decode=(1,),
            shared_lens=(num_parts,), shared_members=(num_parts, SHARED_MEMBERS))
        self._row_ints: dict[str, tuple[int, ...]] = dict(
            output_positions=(rows,), tokens_left=(rows,), min_tokens=(rows,), stop_ids=(rows, NUM_STOP_IDS),
            top_k=(rows,), seeds=(rows, 2), grammar_states=(rows,), mask_places=(rows,), uses_history=(rows,),
            wants_logprobs=(rows,))
        self._row_floats: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), (rows,))
        self._num_ints, self._num_row_ints, self._num_row_floats = (
            sum(map(math.prod, shapes.values())) for shapes in (self._ints, self._row_ints, self._row_floats))

        self._no_logit_rows = np.zeros(num_logit_rows, np.int32)
        self._no_logit_rows.flags.writeable = False
        self._num_mask_words = -(-vocab_size // 32)

    def allocate(self, *, with_params: bool = True, with_logit_rows: bool = True, with_masks: bool = False
                 ) -> PackedBatch:
        """Fresh zeroed buffers; what a step does not use is empty, or one read-only array for all steps."""
        logit_rows = (np.zeros_like(self._no_logit_rows) if with_logit_rows else self._no_logit_rows for _ in range(2))
        return PackedBatch(np.zeros(self._num_ints, np.int32),
                           np.zeros(self._num_row_ints if with_params else 0, np.int32),
                           np.zeros(self._num_row_floats if with_params else 0, np.float32), *logit_rows,
                           np.zeros((self.shape.num_rows if with_masks else 0, self._num_mask_words), np.uint32))

    def step_batch(self, ints: Any) -> StepBatch:
        """The fields of `PackedBatch.ints`, as views; works on NumPy and on traced arrays."""
        return StepBatch(**_cut(ints, self._ints))

    def row_params(self, row_ints: Any, row_floats: Any) -> RowParams:
        """The fields of `PackedBatch.row_ints` and `row_floats`, as views."""
        return RowParams(**_cut(row_ints, self._row_ints), **_cut(row_floats, self._row_floats))


def _cut(buffer: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    fields, offset = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        fields[name] = buffer[offset:offset + size].reshape(shape)
        offset += size
    return fields
