"""One step as a pure function: embed, layers with paged attention, logits, sample. Everything it needs is an argument."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jradix.batch import LOGIT_BLOCK, PackedBatch, StepBatch, StepLayout
from jradix.config import KVGroup
from jradix.models.decoder import Decoder
from jradix.ops.attention import paged_attention
from jradix.ops.kv_cache import KVCache, write_pages
from jradix.ops.sampling import (SamplingInputs, SamplingState, adjust_logits, argmax, log_probabilities, sample)
from jradix.sampling_params import MAX_LOGPROBS


class RowState(NamedTuple):
    """What the device remembers of each running request, by slot. Donated to every step.

    R is max_num_seqs; row R belongs to nobody and takes the writes of padding.

    Attributes:
      last_token: int32[R + 1], the newest sampled token.
      output_counts: int32[R + 1, V], how often each token was sampled.
      in_prompt: bool[R + 1, V], tokens of the prompt.
      logit_bias: float32[R + 1, V].
    """
    last_token: Array
    output_counts: Array
    in_prompt: Array
    logit_bias: Array


class TokenLogprobs(NamedTuple):
    """Log-probabilities at n positions: of one token each, its rank (1 is best), and the best `MAX_LOGPROBS` tokens."""
    logprob: Array        # float32[n]
    rank: Array           # int32[n]
    top_ids: Array        # int32[n, MAX_LOGPROBS]
    top_logprobs: Array   # float32[n, MAX_LOGPROBS]


class StepOutput(NamedTuple):
    """Results of a step, on the device until fetched.

    Attributes:
      tokens: int32[num_steps, S], -1 where nothing was sampled.
      sampled: log-probabilities of `tokens`, leading axes [num_steps, S]; zeros unless a row wants them.
      prompt: log-probabilities at the batch's `logit_rows`, leading axis [K]; zeros beyond their number.
    """
    tokens: Array
    sampled: TokenLogprobs
    prompt: TokenLogprobs


@dataclass(frozen=True)
class StepSettings:
    """What is fixed for all steps of a model.

    Attributes:
      head_dim: D.
      vocab_size: V, width of the head.
      num_valid_tokens: ids the tokenizer knows; the head's others are never sampled.
      layer_windows: attention window of each layer, None for full attention.
      groups: KV groups; their layers share a page table.
      implementation: of the attention, None for the default.
    """
    head_dim: int
    vocab_size: int
    num_valid_tokens: int
    layer_windows: tuple[int | None, ...]
    groups: tuple[KVGroup, ...]
    implementation: str | None = None

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        owner = {layer: g for g, group in enumerate(self.groups) for layer in group.layers}
        return tuple(owner[layer] for layer in range(len(self.layer_windows)))


def make_step(merge: Callable[[list[Array]], Decoder], layout: StepLayout, settings: StepSettings,
              num_steps: int) -> Callable[..., tuple[StepOutput, KVCache, RowState]]:
    """The function `step(leaves, kv, state, ints, floats) -> (output, kv, state)` of one shape, to be jitted."""

    def step(leaves: list[Array], kv: KVCache, state: RowState, ints: Array, floats: Array
             ) -> tuple[StepOutput, KVCache, RowState]:
        model = merge(leaves)
        batch = layout.unpack(PackedBatch(ints, floats))
        if num_steps > 1:
            return _decode_steps(model, settings, batch, kv, state, num_steps)
        tokens = _input_tokens(batch, state)
        hidden, kv = _forward(model, settings, kv, tokens, batch.page_table, batch.kv_lens, batch.cu_q_lens,
                              batch.counts[0], has_chunks=layout.shape.num_chunk_tokens > 0)
        last = jnp.clip(batch.cu_q_lens[1:] - 1, 0, layout.shape.num_tokens - 1)
        sampled, logprobs, state = _sample(model, settings, batch, hidden[last], batch.output_positions,
                                           batch.is_sampled == 1, state)
        output = StepOutput(sampled[None], jax.tree.map(lambda x: x[None], logprobs),
                            _prompt_logprobs(model, settings, batch, hidden))
        return output, kv, state

    return step


def reset_rows(state: RowState, slot: Array, output_counts: Array, in_prompt: Array, logit_bias: Array) -> RowState:
    """Sets one slot's history before its request runs: counts int32[V], prompt bool[V], bias float32[V]."""
    return state._replace(output_counts=state.output_counts.at[slot].set(output_counts),
                          in_prompt=state.in_prompt.at[slot].set(in_prompt),
                          logit_bias=state.logit_bias.at[slot].set(logit_bias))


def _input_tokens(batch: StepBatch, state: RowState) -> Array:
    """Flat tokens, those of running rows taken from the device where the host does not know them yet."""
    num_rows = batch.token_src.shape[0]
    from_device = state.last_token[jnp.maximum(batch.token_src, 0)]
    head = jnp.where(batch.token_src >= 0, from_device, batch.tokens[:num_rows])
    return jnp.concatenate([head, batch.tokens[num_rows:]])


def _forward(model: Decoder, settings: StepSettings, kv: KVCache, tokens: Array, page_table: Array, kv_lens: Array,
             cu_q_lens: Array, num_decode: Array, *, has_chunks: bool) -> tuple[Array, KVCache]:
    """Runs the layers over flat tokens; all KV of the step is written before any of it is read.

    Returns:
      float32[T, H] after the final norm, and the KV cache.
    """
    num_tokens, num_rows = tokens.shape[0], kv_lens.shape[0]
    page_size = kv.k[0].shape[1]
    flat = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], flat, side="right").astype(jnp.int32)
    is_real = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    positions = jnp.where(is_real, kv_lens[row] - cu_q_lens[row + 1] + flat, 0)
    pages = page_table[:, row, positions // page_size]
    write_slots = jnp.where(is_real, pages * page_size + positions % page_size, 0)    # slot 0: the scratch page
    keys, values = list(kv.k), list(kv.v)
    group_of_layer = settings.group_of_layer

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        group = group_of_layer[layer]
        keys[layer] = write_pages(keys[layer], k.reshape(num_tokens, -1), write_slots[group])
        values[layer] = write_pages(values[layer], v.reshape(num_tokens, -1), write_slots[group])
        return paged_attention(q, keys[layer], values[layer], page_table[group], kv_lens, cu_q_lens, num_decode,
                               sm_scale=settings.head_dim ** -0.5, sliding_window=settings.layer_windows[layer],
                               has_chunks=has_chunks, implementation=settings.implementation)

    hidden = model(tokens, positions, attend)
    return hidden, KVCache(tuple(keys), tuple(values))


def _sample(model: Decoder, settings: StepSettings, batch: StepBatch, hidden: Array, output_positions: Array,
            is_sampled: Array, state: RowState) -> tuple[Array, TokenLogprobs, RowState]:
    """Draws one token per row from hidden [S, H]; rows that are not sampled keep their state and give -1.

    Greedy rows alone cost one argmax: the full sampler and the log-probabilities are branches taken at run time, so
    that they need no compiled shapes of their own.
    """
    logits = _logits(model, settings, hidden)
    slots = batch.row_slots

    def draw(_: None) -> Array:
        history = SamplingState(state.output_counts[slots], state.in_prompt[slots], state.logit_bias[slots])
        inputs = SamplingInputs(
            temperature=batch.temperature, top_p=batch.top_p, min_p=batch.min_p,
            presence_penalty=batch.presence_penalty, frequency_penalty=batch.frequency_penalty,
            repetition_penalty=batch.repetition_penalty, top_k=batch.top_k,
            seed=lax.bitcast_convert_type(batch.seeds, jnp.uint32), position=output_positions, stop_ids=batch.stop_ids,
            suppress_stop=output_positions < batch.min_tokens)
        return sample(adjust_logits(logits, history, inputs), inputs)

    tokens = lax.cond(batch.counts[2] > 0, draw, lambda _: argmax(logits), None)
    logprobs = lax.cond(batch.counts[3] > 0, lambda: TokenLogprobs(*log_probabilities(logits, tokens, _num_top(settings))),
                        lambda: _no_logprobs(tokens.shape[0], _num_top(settings)))
    spare = state.last_token.shape[0] - 1
    targets = jnp.where(is_sampled, slots, spare)
    state = state._replace(last_token=state.last_token.at[targets].set(tokens),
                           output_counts=state.output_counts.at[targets, tokens].add(1))
    return jnp.where(is_sampled, tokens, -1), logprobs, state


def _decode_steps(model: Decoder, settings: StepSettings, batch: StepBatch, kv: KVCache, state: RowState,
                  num_steps: int) -> tuple[StepOutput, KVCache, RowState]:
    """`num_steps` decode steps in one call. A row is done after its last token or a stop id and then writes nowhere."""
    num_rows = batch.kv_lens.shape[0]
    num_top = _num_top(settings)
    first = _input_tokens(batch, state)[:num_rows]

    def body(i: Array, carry: tuple) -> tuple:
        tokens, is_done, output, kv, state = carry
        table = jnp.where(is_done[None, :, None], 0, batch.page_table)    # a done row writes to the scratch page
        hidden, kv = _forward(model, settings, kv, tokens, table, batch.kv_lens + i, batch.cu_q_lens, batch.counts[0],
                              has_chunks=False)
        sampled, logprobs, state = _sample(model, settings, batch, hidden, batch.output_positions + i,
                                           (batch.is_sampled == 1) & ~is_done, state)
        output = jax.tree.map(lambda all_steps, one: lax.dynamic_update_index_in_dim(all_steps, one, i, 0), output,
                              (sampled, logprobs))
        stopped = (sampled[:, None] == batch.stop_ids).any(axis=1)
        is_done = is_done | stopped | (i + 1 >= batch.tokens_left)
        return jnp.where(is_done, tokens, sampled), is_done, output, kv, state

    empty = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_steps, *x.shape)),
                         (jnp.zeros(num_rows, jnp.int32), _no_logprobs(num_rows, num_top)))
    _, _, (sampled, logprobs), kv, state = lax.fori_loop(0, num_steps, body,
                                                         (first, batch.is_sampled == 0, empty, kv, state))
    return StepOutput(sampled, logprobs, _no_logprobs(batch.logit_rows.shape[0], num_top)), kv, state


def _prompt_logprobs(model: Decoder, settings: StepSettings, batch: StepBatch, hidden: Array) -> TokenLogprobs:
    """Log-probabilities at the wanted prompt positions, a block of positions at a time: never [T, V]."""
    num_top = _num_top(settings)

    def body(i: Array, result: TokenLogprobs) -> TokenLogprobs:
        rows = lax.dynamic_slice(batch.logit_rows, (i * LOGIT_BLOCK,), (LOGIT_BLOCK,))
        targets = lax.dynamic_slice(batch.logit_targets, (i * LOGIT_BLOCK,), (LOGIT_BLOCK,))
        block = log_probabilities(_logits(model, settings, hidden[rows]), targets, num_top)
        return TokenLogprobs(*(lax.dynamic_update_slice_in_dim(whole, part, i * LOGIT_BLOCK, 0)
                               for whole, part in zip(result, block)))

    num_blocks = (batch.counts[1] + LOGIT_BLOCK - 1) // LOGIT_BLOCK
    return lax.fori_loop(0, num_blocks, body, _no_logprobs(batch.logit_rows.shape[0], num_top))


def _logits(model: Decoder, settings: StepSettings, hidden: Array) -> Array:
    """[K, H] -> float32[K, V]; ids beyond the tokenizer's can never be drawn."""
    logits = model.logits(hidden)
    if settings.num_valid_tokens < settings.vocab_size:
        logits = jnp.where(jnp.arange(settings.vocab_size) < settings.num_valid_tokens, logits, -jnp.inf)
    return logits


def _num_top(settings: StepSettings) -> int:
    return min(MAX_LOGPROBS, settings.num_valid_tokens)


def _no_logprobs(n: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(jnp.zeros(n), jnp.zeros(n, jnp.int32), jnp.zeros((n, num_top), jnp.int32),
                         jnp.zeros((n, num_top)))
