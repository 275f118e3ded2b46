"""Grammar tables on the device: the masks of constrained rows, and the step from one automaton state to the next.

All grammars share one arena of static shapes. A state is a number in the arena's range of states, so one int32 says
where a row stands and which grammar it belongs to. R mask rows, W = ceil(V / 32) words, N states, M transitions,
G grammars, B bytes of all tokens, V vocabulary.

**Reserved.** State 0 is "no grammar": logits pass untouched, bit for bit, and it leads to itself; its mask row 0 has
all real tokens. State 1 is "ended": a token that its state's grammar rejects leads there, which is the end token itself
or a stop token, as no other can be drawn. It leads to itself, its mask row 1 has the end tokens, and a row's own stop
tokens are allowed in it, as in every accepting state. Grammar 0 belongs to both.

**Two forms of transitions.** `next_state` is one flat array; state s of a grammar with C classes has its C entries from
`state_base[s]` on. The class is that of the token, or, where a grammar `uses_bytes`, of each byte of the token in turn.
Entries are numbers inside the grammar, 65,535 rejects.

**Planar bits.** Token v is bit v // W of word v % W: one shift serves W neighbouring tokens, so unpacking is vector
code.
"""
from __future__ import annotations

from typing import NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

FREE_STATE = 0
ENDED_STATE = 1
REJECTED = 65_535   # no transition
NUM_BYTES = 256
WORD_BITS = 32

_SMALLEST = float(jnp.finfo(jnp.float32).min)


class GrammarArena(NamedTuple):
    """Tables of all grammars in use. Read by steps, replaced by uploads alone.

    Attributes:
      mask_rows: uint32[R, W], planar bits of the tokens allowed.
      state_row: int32[N], mask row of each state.
      state_base: int32[N], where each state's transitions begin.
      state_grammar: int32[N].
      is_accepting: bool[N], the text may end here.
      next_state: uint16[M].
      classes: uint16[G, max(V, 256)], class of each token, or of each byte in the first 256.
      first_state: int32[G], added to what `next_state` says.
      uses_bytes: bool[G].
      token_bytes: uint8[B], the bytes of all tokens one after the other.
      token_starts: int32[V + 1], where each token's bytes begin; special tokens have none.
    """
    mask_rows: Array
    state_row: Array
    state_base: Array
    state_grammar: Array
    is_accepting: Array
    next_state: Array
    classes: Array
    first_state: Array
    uses_bytes: Array
    token_bytes: Array
    token_starts: Array


class ArenaBlock(NamedTuple):
    """A part of one grammar's tables, of the size that one call of `write_block` takes.

    Of the arrays for states and transitions only the entries [low, high) are written, from `base + low` on.

    Attributes:
      row_ids: int32[r], mask rows to write; R and beyond: none.
      mask_rows: uint32[r, W].
      grammar, first_state: int32.
      uses_bytes: bool.
      classes: uint16[max(V, 256)].
      states, transitions: int32[3], base, low and high.
      state_row, state_base: int32[n].
      is_accepting: bool[n].
      next_state: uint16[m].
    """
    row_ids: np.ndarray
    mask_rows: np.ndarray
    grammar: np.ndarray
    first_state: np.ndarray
    uses_bytes: np.ndarray
    classes: np.ndarray
    states: np.ndarray
    state_row: np.ndarray
    state_base: np.ndarray
    is_accepting: np.ndarray
    transitions: np.ndarray
    next_state: np.ndarray


def make_arena(*, num_rows: int, num_states: int, num_transitions: int, num_grammars: int, vocab_size: int,
               num_valid_tokens: int, eos_ids: Sequence[int] = (), token_bytes: Sequence[bytes | None] | None = None,
               device: jax.Device | None = None) -> GrammarArena:
    """An arena without grammars.

    Args:
      num_rows, num_states: at least 2, the reserved ones.
      num_transitions, num_grammars: at least 1.
      vocab_size: V, width of the head.
      num_valid_tokens: real tokens; the head's others are never allowed.
      eos_ids: end tokens, allowed in the state "ended"; none: all real tokens are.
      token_bytes: of each token, None for special ones; needed for grammars that step over bytes.
    """
    ids = np.arange(num_valid_tokens)
    reserved = pack_ids([ids, np.asarray(list(eos_ids) or ids)], vocab_size)
    pieces = [piece or b"" for piece in token_bytes or ()]
    pieces += [b""] * (vocab_size + 1 - len(pieces))
    starts = np.cumsum([0] + [len(piece) for piece in pieces[:vocab_size]]).astype(np.int32)
    text = np.frombuffer(b"".join(pieces) or b"\0", np.uint8)

    def zeros(shape: tuple[int, ...], dtype: object) -> Array:
        return jnp.zeros(shape, dtype, device=device)

    return GrammarArena(
        mask_rows=zeros((num_rows, reserved.shape[1]), jnp.uint32).at[:2].set(reserved),
        state_row=zeros((num_states,), jnp.int32).at[ENDED_STATE].set(1),
        state_base=zeros((num_states,), jnp.int32), state_grammar=zeros((num_states,), jnp.int32),
        is_accepting=zeros((num_states,), bool).at[ENDED_STATE].set(True),
        next_state=zeros((num_transitions,), jnp.uint16),
        classes=zeros((num_grammars, max(vocab_size, NUM_BYTES)), jnp.uint16),
        first_state=zeros((num_grammars,), jnp.int32), uses_bytes=zeros((num_grammars,), bool),
        token_bytes=jnp.array(text, device=device), token_starts=jnp.array(starts, device=device))


def pack_ids(rows: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """Planar bit rows uint32[n, W] with the given token ids set."""
    num_words = -(-vocab_size // WORD_BITS)
    packed = np.zeros((len(rows), num_words), np.uint32)
    for row, ids in zip(packed, rows):
        np.bitwise_or.at(row, ids % num_words, np.uint32(1) << (ids // num_words).astype(np.uint32))
    return packed


def apply_mask(logits: Array, arena: GrammarArena, states: Array, *, stop_ids: Array | None = None,
               row_masks: Array | None = None, mask_places: Array | None = None) -> Array:
    """Gives -inf to the tokens a row's grammar does not allow.

    An allowed logit of -inf or NaN becomes the smallest float: such a token has no weight beside any other, but is
    taken where the grammar leaves nothing else. So a grammar outranks all else that takes tokens away, such as
    `min_tokens` at the end of the text, and a row always has an allowed token.

    Args:
      logits: float32[S, V], penalties and suppressed stop ids already applied.
      states: int32[S].
      stop_ids: int32[S, n], distinct ids that end the row's output, padded with ids outside the vocabulary. They are
        allowed exactly in accepting states, also where they are tokens of the grammar's text.
      row_masks: uint32[H, W], masks that come with the step.
      mask_places: int32[S], 1 + the row's place in `row_masks`, 0 for none; such a row's state is not looked at.

    Returns:
      float32[S, V]. Rows without a grammar or mask of their own are the same bits.
    """
    words = arena.mask_rows[arena.state_row[states]]
    if stop_ids is not None:
        words = _with_stop_ids(words, arena.is_accepting[states], stop_ids, logits.shape[1])
    constrained = states != FREE_STATE
    if row_masks is not None:
        has_mask = mask_places > 0
        words = jnp.where(has_mask[:, None], row_masks[jnp.maximum(mask_places - 1, 0)], words)
        constrained = constrained | has_mask
    allowed = _unpack(words, logits.shape[1])
    masked = jnp.where(allowed, jnp.where(logits > -jnp.inf, logits, _SMALLEST), -jnp.inf)
    return jnp.where(constrained[:, None], masked, logits)


def advance(arena: GrammarArena, states: Array, tokens: Array) -> Array:
    """The states int32[S] after one token each: a few gathers, per byte of the token where a grammar uses bytes.

    Args:
      states: int32[S].
      tokens: int32[S] in [0, V).
    """
    grammar = arena.state_grammar[states]
    uses_bytes = arena.uses_bytes[grammar]
    start = arena.token_starts[tokens]
    length = jnp.where(uses_bytes, arena.token_starts[tokens + 1] - start, 1)
    states = jnp.where((length == 0) & (states != FREE_STATE), ENDED_STATE, states)

    def step(i: Array, states: Array) -> Array:
        is_live = (states > ENDED_STATE) & (i < length)
        symbol = jnp.where(uses_bytes, arena.token_bytes[start + i].astype(jnp.int32), tokens)
        following = arena.next_state[arena.state_base[states] + arena.classes[grammar, symbol].astype(jnp.int32)]
        moved = jnp.where(following == REJECTED, ENDED_STATE, arena.first_state[grammar] + following.astype(jnp.int32))
        return jnp.where(is_live, moved, states)

    return lax.fori_loop(0, jnp.max(jnp.where(states > ENDED_STATE, length, 0)), step, states)


def write_block(arena: GrammarArena, block: ArenaBlock) -> GrammarArena:
    """Writes a part of a grammar's tables; donate the arena, and the cost is that of the block."""
    def write(old: Array, place: Array, new: Array) -> Array:
        base, low, high = place
        index = jnp.arange(new.shape[0], dtype=jnp.int32)
        kept = lax.dynamic_slice(old, (base,), new.shape)
        return lax.dynamic_update_slice(old, jnp.where((low <= index) & (index < high), new, kept), (base,))

    grammar = block.grammar
    return arena._replace(
        mask_rows=arena.mask_rows.at[block.row_ids].set(block.mask_rows, mode="drop"),
        state_row=write(arena.state_row, block.states, block.state_row),
        state_base=write(arena.state_base, block.states, block.state_base),
        state_grammar=write(arena.state_grammar, block.states, jnp.broadcast_to(grammar, block.state_row.shape)),
        is_accepting=write(arena.is_accepting, block.states, block.is_accepting),
        next_state=write(arena.next_state, block.transitions, block.next_state),
        classes=arena.classes.at[grammar].set(block.classes),
        first_state=arena.first_state.at[grammar].set(block.first_state),
        uses_bytes=arena.uses_bytes.at[grammar].set(block.uses_bytes))


def _with_stop_ids(words: Array, is_accepting: Array, stop_ids: Array, vocab_size: int) -> Array:
    """Sets the bits of the stop ids in accepting states and clears them in the others, if that leaves any bit set.

    Distinct ids have distinct bits, so that adding and subtracting them is exact.
    """
    num_words = words.shape[1]
    rows = jnp.arange(words.shape[0], dtype=jnp.int32)[:, None]
    is_real = (stop_ids >= 0) & (stop_ids < vocab_size)
    place = jnp.where(is_real, stop_ids % num_words, num_words)
    bit = (stop_ids // num_words).astype(jnp.uint32) % WORD_BITS
    is_set = (words.at[rows, place].get(mode="fill", fill_value=0) >> bit) & 1
    change = is_accepting[:, None].astype(jnp.uint32) - is_set      # 1: set, -1: clear
    changed = words.at[rows, place].add(change << bit, mode="drop")
    return jnp.where(jnp.any(changed != 0, axis=1, keepdims=True), changed, words)


def _unpack(words: Array, vocab_size: int) -> Array:
    """Planar bits uint32[S, W] -> bool[S, V]."""
    shifts = lax.broadcasted_iota(jnp.uint32, (1, WORD_BITS, 1), 1)
    bits = (words[:, None, :] >> shifts) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] == 1
