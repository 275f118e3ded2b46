"""One step as pure functions: embed, layers with paged attention, logits, sample. All they need is an argument.

A step is one call, `forward`, when every row takes its most probable token. The full sampler, which also applies
grammar masks and moves the rows' grammar states on, and the log-probabilities inside prompts are calls of their own
that follow it: they depend on the number of rows alone, or on nothing, and so do not multiply the compiled shapes of
the forward pass.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jradix.batch import LOGIT_BLOCK, RowParams, StepBatch, StepLayout, TokenLogprobs
from jradix.config import KVGroup
from jradix.models.decoder import Decoder
from jradix.ops.attention import SharedPrefixes, paged_attention
from jradix.ops.grammar import FREE_STATE, GrammarArena, advance, apply_mask
from jradix.ops.kv_cache import KVCache, write_kv
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
      grammar_state: int32[R + 1], where the request stands in its grammar after its newest sampled token. Read only
        where the host says so, so that a slot's earlier owner leaves nothing behind.
    """
    last_token: Array
    output_counts: Array
    in_prompt: Array
    logit_bias: Array
    grammar_state: Array


class StepOutput(NamedTuple):
    """Results of a step, on the device until fetched.

    Attributes:
      tokens: int32[num_steps, S], -1 where nothing was sampled.
      sampled: log-probabilities of `tokens`, leading axes [num_steps, S]; None when no row samples or wants them.
      prompt: log-probabilities at the batch's `logit_rows`, leading axis [W]; None when there are none.
    """
    tokens: Array
    sampled: TokenLogprobs | None
    prompt: TokenLogprobs | None


class Forward(NamedTuple):
    """What the forward pass leaves for the programs that may follow it.

    Attributes:
      tokens: int32[1, S], the most probable token of each row, -1 where nothing is sampled.
      logits: float32[S, V] after each row's last token.
      slots: int32[S], where each row's sampled token is remembered; the spare slot for rows that sample nothing.
      wanted: float32[W, H], hidden states at the batch's `logit_rows`.
    """
    tokens: Array
    logits: Array
    slots: Array
    wanted: Array


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
      platform: of the device.
    """
    head_dim: int
    vocab_size: int
    num_valid_tokens: int
    layer_windows: tuple[int | None, ...]
    groups: tuple[KVGroup, ...]
    implementation: str | None = None
    platform: str | None = None

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        owner = {layer: g for g, group in enumerate(self.groups) for layer in group.layers}
        return tuple(owner[layer] for layer in range(len(self.layer_windows)))


def make_forward(merge: Callable[[list[Array]], Decoder], layout: StepLayout, settings: StepSettings
                 ) -> Callable[..., tuple[Forward, KVCache, RowState]]:
    """`forward(leaves, kv, state, ints, logit_rows)`: a whole step for rows that take the most probable token."""

    def forward(leaves: list[Array], kv: KVCache, state: RowState, ints: Array, logit_rows: Array
                ) -> tuple[Forward, KVCache, RowState]:
        model = merge(leaves)
        batch = layout.step_batch(ints)
        hidden, kv = _run_layers(model, settings, kv, _input_tokens(batch, state), batch.page_table, batch.kv_lens,
                                 batch.cu_q_lens, batch.num_decode[0], _shared_prefixes(batch),
                                 has_chunks=layout.shape.has_chunks)
        last = jnp.clip(batch.cu_q_lens[1:] - 1, 0, layout.shape.num_tokens - 1)
        logits = _logits(model, settings, hidden[last], _num_rows(batch))
        best = argmax(logits)
        slots = jnp.where(batch.is_sampled == 1, batch.row_slots, state.last_token.shape[0] - 1)
        tokens = jnp.where(batch.is_sampled == 1, best, -1)[None]
        return Forward(tokens, logits, slots, hidden[logit_rows]), kv, _remember(state, slots, best)

    return forward


def make_sampling(layout: StepLayout, settings: StepSettings) -> Callable[..., tuple[Array, TokenLogprobs, RowState]]:
    """`sampling(state, arena, tokens, logits, slots, row_ints, row_floats, row_masks)`: draws by each row's parameters.

    It follows a forward pass of as many rows and replaces the tokens which that one took and remembered.
    """

    def sampling(state: RowState, arena: GrammarArena, tokens: Array, logits: Array, slots: Array, row_ints: Array,
                 row_floats: Array, row_masks: Array) -> tuple[Array, TokenLogprobs, RowState]:
        params = layout.row_params(row_ints, row_floats)
        state = _take_grammar_states(state, slots, params)
        taken = jnp.maximum(tokens[0], 0)     # rows without a token are at the spare slot, whose counts nobody reads
        state = state._replace(output_counts=state.output_counts.at[slots, taken].add(-1))
        drawn, logprobs, state = _draw(settings, params, logits, slots, params.output_positions, state, arena,
                                       row_masks)
        return (jnp.where(tokens < 0, tokens, drawn[None]), jax.tree.map(lambda x: x[None], logprobs),
                _remember(state, slots, drawn))

    return sampling


def make_prompt_logprobs(merge: Callable[[list[Array]], Decoder],
                         settings: StepSettings) -> Callable[..., TokenLogprobs]:
    """`prompt_logprobs(leaves, wanted, targets, count)`.

    wanted float32[W, H], targets int32[W], the first `count` valid.
    """

    def prompt_logprobs(leaves: list[Array], wanted: Array, targets: Array, count: Array) -> TokenLogprobs:
        """A block of positions at a time: never [W, V]."""
        model = merge(leaves)
        num_top = _num_top(settings)

        def body(i: Array, result: TokenLogprobs) -> TokenLogprobs:
            start = i * LOGIT_BLOCK
            hidden = lax.dynamic_slice_in_dim(wanted, start, LOGIT_BLOCK)
            block = log_probabilities(_logits(model, settings, hidden, count - start),
                                      lax.dynamic_slice_in_dim(targets, start, LOGIT_BLOCK), num_top)
            return TokenLogprobs(*(lax.dynamic_update_slice_in_dim(whole, part, start, 0)
                                   for whole, part in zip(result, block)))

        num_blocks = (count + LOGIT_BLOCK - 1) // LOGIT_BLOCK
        return lax.fori_loop(0, num_blocks, body, _no_logprobs(wanted.shape[0], num_top))

    return prompt_logprobs


def make_decode_steps(merge: Callable[[list[Array]], Decoder], layout: StepLayout, settings: StepSettings,
                      num_steps: int) -> Callable[..., tuple[Array, TokenLogprobs, KVCache, RowState]]:
    """`decode_steps(leaves, kv, state, arena, ints, row_ints, row_floats)`: `num_steps` decode steps in one call.

    A row is done after its last token or a stop id; from then on it writes to the scratch page and yields -1.
    """

    def decode_steps(leaves: list[Array], kv: KVCache, state: RowState, arena: GrammarArena, ints: Array,
                     row_ints: Array, row_floats: Array) -> tuple[Array, TokenLogprobs, KVCache, RowState]:
        model = merge(leaves)
        batch, params = layout.step_batch(ints), layout.row_params(row_ints, row_floats)
        shared = _shared_prefixes(batch)       # the pages as they are now: a leader that is done loses its own
        num_rows, spare = layout.shape.num_rows, state.last_token.shape[0] - 1

        def body(i: Array, carry: tuple) -> tuple:
            tokens, is_done, output, kv, state = carry
            table = jnp.where(is_done[None, :, None], 0, batch.page_table)
            hidden, kv = _run_layers(model, settings, kv, tokens, table, batch.kv_lens + i, batch.cu_q_lens,
                                     batch.num_decode[0], shared, has_chunks=False)
            slots = jnp.where(is_done, spare, batch.row_slots)
            logits = _logits(model, settings, hidden, _num_rows(batch))
            drawn, logprobs, state = _draw(settings, params, logits, slots, params.output_positions + i, state, arena)
            state = _remember(state, slots, drawn)
            drawn = jnp.where(is_done, -1, drawn)
            output = jax.tree.map(lambda steps, one: lax.dynamic_update_index_in_dim(steps, one, i, 0), output,
                                  (drawn, logprobs))
            stopped = (drawn[:, None] == params.stop_ids).any(axis=1)
            is_done = is_done | stopped | (i + 1 >= params.tokens_left)
            return jnp.where(is_done, tokens, drawn), is_done, output, kv, state

        empty = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_steps, *x.shape)),
                             (jnp.zeros(num_rows, jnp.int32), _no_logprobs(num_rows, _num_top(settings))))
        is_padding = batch.is_sampled == 0
        state = _take_grammar_states(state, jnp.where(is_padding, spare, batch.row_slots), params)
        start = _input_tokens(batch, state), is_padding, empty, kv, state
        _, _, (drawn, logprobs), kv, state = lax.fori_loop(0, num_steps, body, start)
        return drawn, logprobs, kv, state

    return decode_steps


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


def _shared_prefixes(batch: StepBatch) -> tuple[SharedPrefixes, ...] | None:
    """The step's groups with a common prefix, per KV group; None where the step has no room for any."""
    members = batch.shared_members
    if not len(members):
        return None
    num_tokens, num_rows = batch.tokens.shape[0], batch.kv_lens.shape[0]
    row = jnp.searchsorted(batch.cu_q_lens[1:], jnp.arange(num_tokens), side="right")      # rows of queries
    leaders = jnp.minimum(row[jnp.clip(members[:, 0], 0, num_tokens - 1)], num_rows - 1)
    return tuple(SharedPrefixes(table[leaders], batch.shared_lens, members) for table in batch.page_table)


def _run_layers(model: Decoder, settings: StepSettings, kv: KVCache, tokens: Array, page_table: Array, kv_lens: Array,
                cu_q_lens: Array, num_decode: Array, shared: tuple[SharedPrefixes, ...] | None, *, has_chunks: bool
                ) -> tuple[Array, KVCache]:
    """Runs the layers over flat tokens; all KV of the step is written before any of it is read.

    Without chunks the attention takes each token as a decode row of its own, also where several belong to one row.

    Returns:
      float32[T, H] after the final norm, and the KV cache.
    """
    num_tokens, num_rows = tokens.shape[0], kv_lens.shape[0]
    page_size = kv.k[0].shape[1]
    flat = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], flat, side="right").astype(jnp.int32)
    is_real, num_real = row < num_rows, cu_q_lens[-1]
    row = jnp.minimum(row, num_rows - 1)
    positions = jnp.where(is_real, kv_lens[row] - cu_q_lens[row + 1] + flat, 0)
    if not has_chunks and num_tokens > num_rows:
        page_table, kv_lens = page_table[:, row], jnp.where(is_real, positions + 1, 0)
        cu_q_lens, num_decode = jnp.arange(num_tokens + 1, dtype=jnp.int32), jnp.int32(num_tokens)
        row = flat
    pages = page_table[:, row, positions // page_size]
    write_slots = jnp.where(is_real, pages * page_size + positions % page_size, 0)    # slot 0: the scratch page
    keys, values = list(kv.k), list(kv.v)
    group_of_layer = settings.group_of_layer

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        group = group_of_layer[layer]
        keys[layer], values[layer] = write_kv(keys[layer], values[layer], k.reshape(num_tokens, -1),
                                              v.reshape(num_tokens, -1), write_slots[group],
                                              implementation=settings.implementation)
        window = settings.layer_windows[layer]
        return paged_attention(q, keys[layer], values[layer], page_table[group], kv_lens, cu_q_lens, num_decode,
                               sm_scale=settings.head_dim ** -0.5, sliding_window=window,
                               shared=shared[group] if shared and window is None else None, has_chunks=has_chunks,
                               implementation=settings.implementation, platform=settings.platform)

    hidden = model(tokens, positions, attend, num_real)
    return hidden, KVCache(tuple(keys), tuple(values))


def _take_grammar_states(state: RowState, slots: Array, params: RowParams) -> RowState:
    """Sets the grammar states that the host knows, and those of padding to none."""
    given, spare = params.grammar_states, state.grammar_state.shape[0] - 1
    states = jnp.where(given < 0, state.grammar_state[slots], given)
    states = jnp.where(slots == spare, FREE_STATE, states)
    return state._replace(grammar_state=state.grammar_state.at[slots].set(states))


def _draw(settings: StepSettings, params: RowParams, logits: Array, slots: Array, output_positions: Array,
          state: RowState, arena: GrammarArena, row_masks: Array | None = None
          ) -> tuple[Array, TokenLogprobs, RowState]:
    """One token [S] per row by its own parameters, the log-probabilities of the raw logits, the state moved on.

    Each part that no row of the step asks for is skipped; none of them changes a bit for the rows that do not ask.
    """
    inputs = SamplingInputs(
        temperature=params.temperature, top_p=params.top_p, min_p=params.min_p, top_k=params.top_k,
        presence_penalty=params.presence_penalty, frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty, seed=lax.bitcast_convert_type(params.seeds, jnp.uint32),
        position=output_positions, stop_ids=params.stop_ids, suppress_stop=output_positions < params.min_tokens)
    states = jnp.where(slots == state.grammar_state.shape[0] - 1, FREE_STATE, state.grammar_state[slots])
    has_mask = states != FREE_STATE
    masks: dict[str, Array] = {}
    if row_masks is not None:
        masks = dict(row_masks=row_masks, mask_places=params.mask_places)
        has_mask = has_mask | (params.mask_places > 0)

    def adjusted(x: Array) -> Array:
        history = SamplingState(state.output_counts[slots], state.in_prompt[slots], state.logit_bias[slots])
        return adjust_logits(x, history, inputs)

    def masked(x: Array) -> Array:
        return apply_mask(x, arena, states, stop_ids=params.stop_ids, **masks)

    is_adjusted = jnp.any((params.uses_history == 1) | inputs.suppress_stop)
    case = is_adjusted.astype(jnp.int32) + 2 * jnp.any(has_mask).astype(jnp.int32)
    weighed = lax.switch(case, (lambda x: x, adjusted, masked, lambda x: masked(adjusted(x))), logits)  # one new copy
    tokens = sample(weighed, inputs)
    num_top = _num_top(settings)
    logprobs = lax.cond(jnp.any(params.wants_logprobs == 1),
                        lambda: TokenLogprobs(*log_probabilities(logits, tokens, num_top)),
                        lambda: _no_logprobs(logits.shape[0], num_top))
    moved = state.grammar_state.at[slots].set(advance(arena, states, tokens))
    return tokens, logprobs, state._replace(grammar_state=moved)


def _remember(state: RowState, slots: Array, tokens: Array) -> RowState:
    return state._replace(last_token=state.last_token.at[slots].set(tokens),
                          output_counts=state.output_counts.at[slots, tokens].add(1))


def _num_rows(batch: StepBatch) -> Array:
    """Rows of the step that are no padding, int32[]: they come first."""
    return jnp.sum(batch.kv_lens > 0, dtype=jnp.int32)


def _logits(model: Decoder, settings: StepSettings, hidden: Array, num_rows: Array) -> Array:
    """[K, H] -> float32[K, V]; ids beyond the tokenizer's can never be drawn. Rows from `num_rows` on are padding."""
    logits = model.logits(hidden, num_rows)
    if settings.num_valid_tokens < settings.vocab_size:
        logits = jnp.where(jnp.arange(settings.vocab_size) < settings.num_valid_tokens, logits, -jnp.inf)
    return logits


def _num_top(settings: StepSettings) -> int:
    return min(MAX_LOGPROBS, settings.num_valid_tokens)


def _no_logprobs(n: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(jnp.zeros(n), jnp.zeros(n, jnp.int32), jnp.zeros((n, num_top), jnp.int32),
                         jnp.zeros((n, num_top)))
