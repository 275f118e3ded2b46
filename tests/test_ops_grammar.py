"""Grammar arena on the device against a NumPy reference: masks, state steps, uploads in blocks, distributions."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jradix.batch import NUM_STOP_IDS, GrammarTables
from jradix.config import GrammarSizes
from jradix.ops import grammar
from jradix.ops.grammar import ENDED_STATE, FREE_STATE, REJECTED, GrammarArena, make_arena, pack_ids
from jradix.ops.sampling import SamplingInputs, argmax, sample
from jradix.runner import grammar_upload
from jradix.runner.grammar_upload import blank_block, check_tables, grammar_blocks

SIZES = GrammarSizes(num_rows=40, num_states=300, num_transitions=5000, num_grammars=4)
VOCAB, VALID, EOS = 96, 50, 2
TOKEN_BYTES = [None if i < 3 else bytes([97 + i % 5] * (1 + i % 4)) for i in range(VALID)]
apply_mask = jax.jit(grammar.apply_mask)
advance = jax.jit(grammar.advance)
write_block = jax.jit(grammar.write_block, donate_argnums=0)


@dataclasses.dataclass
class Reference:
    """The arena in NumPy, token by token: what each grammar allows and where it leads."""
    tables: dict[int, GrammarTables]

    def owner(self, state: int) -> tuple[GrammarTables, int] | None:
        for tables in self.tables.values():
            if 0 <= state - tables.first_state < len(tables.state_row):
                return tables, state - tables.first_state
        return None

    def allowed(self, state: int, rows: dict[int, set[int]], stop_ids: Sequence[int] = ()) -> set[int]:
        if state == FREE_STATE:
            return set(range(VOCAB))
        tables, local = self.owner(state) if state != ENDED_STATE else (None, 0)
        ids = {EOS} if tables is None else rows[int(tables.state_row[local])]
        is_accepting = tables is None or bool(tables.is_accepting[local])
        changed = ids | set(stop_ids) if is_accepting else ids - set(stop_ids)
        return changed or ids

    def advance(self, state: int, token: int) -> int:
        if state in (FREE_STATE, ENDED_STATE):
            return state
        tables, local = self.owner(state)
        symbols = (TOKEN_BYTES + [None] * VOCAB)[token] or b"" if tables.uses_bytes else [token]
        if not symbols:
            return ENDED_STATE
        for symbol in symbols:
            local = int(tables.next_state[local, tables.classes[symbol]])
            if local == REJECTED:
                return ENDED_STATE
        return tables.first_state + local


def random_tables(number: int, rng: np.random.Generator, *, first_state: int, first_transition: int, num_states: int,
                  num_classes: int, row_ids: Sequence[int], uses_bytes: bool = False
                  ) -> tuple[GrammarTables, dict[int, set[int]]]:
    rows = {int(row): set(rng.choice(np.arange(3, VALID), rng.integers(1, 20), replace=False).tolist())
            for row in row_ids}
    following = rng.integers(0, num_states, (num_states, num_classes)).astype(np.uint16)
    following[rng.random(following.shape) < 0.3] = REJECTED
    classes = rng.integers(0, num_classes, 256 if uses_bytes else VOCAB).astype(np.uint16)
    return GrammarTables(
        number, first_state, first_transition, np.array(row_ids, np.int32),
        pack_ids([np.array(sorted(ids)) for ids in rows.values()], VOCAB),
        rng.choice(row_ids, num_states).astype(np.int32), rng.random(num_states) < 0.3, following, classes,
        uses_bytes), rows


def new_arena(sizes: GrammarSizes = SIZES) -> GrammarArena:
    return make_arena(**dataclasses.asdict(sizes), vocab_size=VOCAB, num_valid_tokens=VALID, eos_ids=[EOS],
                      token_bytes=TOKEN_BYTES)


def upload(arena: GrammarArena, tables: GrammarTables, sizes: GrammarSizes = SIZES) -> GrammarArena:
    check_tables(tables, sizes, vocab_size=VOCAB, has_token_bytes=True)
    for block in grammar_blocks(tables, sizes, VOCAB):
        arena = write_block(arena, block)
    return arena


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every grammar of these tests takes several calls."""
    for name, size in (("ROWS_PER_CALL", 4), ("STATES_PER_CALL", 32), ("TRANSITIONS_PER_CALL", 256)):
        monkeypatch.setattr(grammar_upload, name, size)


def three_grammars(seed: int = 0) -> tuple[list[GrammarTables], dict[int, set[int]]]:
    """By token, by byte, and one that fills the ends of the arena."""
    rng = np.random.default_rng(seed)
    made = [random_tables(1, rng, first_state=2, first_transition=0, num_states=100, num_classes=9,
                          row_ids=range(2, 12)),
            random_tables(2, rng, first_state=102, first_transition=900, num_states=90, num_classes=5,
                          row_ids=[30, 12, 17], uses_bytes=True),
            random_tables(3, rng, first_state=200, first_transition=5000 - 100 * 17, num_states=100, num_classes=17,
                          row_ids=[39, 20, 21, 38, 13])]
    return [tables for tables, _ in made], {row: ids for _, rows in made for row, ids in rows.items()}


def filled_arena(seed: int = 0) -> tuple[GrammarArena, Reference, dict[int, set[int]]]:
    tables, rows = three_grammars(seed)
    arena = new_arena()
    for one in tables:
        arena = upload(arena, one)
    return arena, Reference({one.grammar: one for one in tables}), rows


def kept_ids(masked: np.ndarray) -> list[set[int]]:
    return [set(np.flatnonzero(row > -np.inf).tolist()) for row in masked]


def padded_stop_ids(rows: Sequence[Sequence[int]]) -> jax.Array:
    ids = np.full((len(rows), NUM_STOP_IDS), 2**30, np.int32)
    for row, given in zip(ids, rows):
        row[:len(given)] = given
    return jnp.asarray(ids)


# -- masks

def test_pack_ids_is_planar() -> None:
    packed = pack_ids([np.array([0, 3, 49, 95])], VOCAB)
    assert packed.shape == (1, 3)
    for token in range(VOCAB):
        assert (packed[0, token % 3] >> np.uint32(token // 3)) & 1 == (token in (0, 3, 49, 95))


@pytest.mark.parametrize("vocab_size", [50, 64, 96, 97, 1000])
def test_mask_any_width_keeps_exactly_the_ids_of_the_row(vocab_size: int) -> None:
    """X01: heads that are no multiple of a word, and ids beyond the tokenizer's."""
    valid = min(vocab_size, 50)
    arena = make_arena(num_rows=4, num_states=4, num_transitions=1, num_grammars=2, vocab_size=vocab_size,
                       num_valid_tokens=valid, eos_ids=[EOS])
    ids = np.random.default_rng(0).choice(valid, 17, replace=False)
    arena = arena._replace(mask_rows=arena.mask_rows.at[3].set(pack_ids([ids], vocab_size)[0]),
                           state_row=arena.state_row.at[2].set(0).at[3].set(3))
    logits = np.zeros((4, vocab_size), np.float32)
    logits[:, valid:] = 1e4
    masked = np.asarray(apply_mask(logits, arena, jnp.array([0, 1, 2, 3])))
    assert kept_ids(masked) == [set(range(vocab_size)), {EOS}, set(range(valid)), set(ids.tolist())]
    assert (masked[0] == logits[0]).all()


def test_mask_random_states_equals_the_reference() -> None:
    arena, reference, rows = filled_arena()
    states = np.random.default_rng(1).permutation(300)[:200].astype(np.int32)
    states = np.array([s for s in states if s < 2 or reference.owner(int(s))], np.int32)
    logits = np.random.default_rng(2).normal(size=(len(states), VOCAB)).astype(np.float32)
    masked = np.asarray(apply_mask(logits, arena, states))
    assert kept_ids(masked) == [reference.allowed(int(state), rows) for state in states]
    assert (masked[masked > -np.inf] == logits[masked > -np.inf]).all()


def test_mask_free_rows_are_the_same_bits_between_constrained_ones() -> None:
    """X07: NaN, infinities and negative zeros of a free row included."""
    arena, _, _ = filled_arena()
    logits = np.random.default_rng(3).normal(size=(6, VOCAB)).astype(np.float32)
    logits[1, :5] = [np.nan, np.inf, -np.inf, -0.0, 1e-42]
    logits[4] = -np.inf
    masked = np.asarray(apply_mask(logits, arena, jnp.array([5, 0, 150, 1, 0, 299])))
    for row in (1, 4):
        assert masked[row].tobytes() == logits[row].tobytes()
    assert all(len(ids) < VALID for ids in kept_ids(masked[[0, 2, 3, 5]]))


def test_mask_stop_ids_are_allowed_exactly_in_accepting_states() -> None:
    """X09: end tokens of the request beside the model's own, some of them text of the grammar."""
    arena, reference, rows = filled_arena()
    rng = np.random.default_rng(4)
    states = np.array([s for s in range(1, 300) if s == 1 or reference.owner(s)], np.int32)
    stops = [rng.choice(VALID, rng.integers(0, NUM_STOP_IDS + 1), replace=False).tolist() for _ in states]
    masked = np.asarray(apply_mask(np.zeros((len(states), VOCAB), np.float32), arena, states,
                                   stop_ids=padded_stop_ids(stops)))
    assert kept_ids(masked) == [reference.allowed(int(s), rows, ids) for s, ids in zip(states, stops)]
    emptied = [rows[int(t.state_row[i])] <= set(ids) for s, ids in zip(states[1:], stops[1:])
               for t, i in [reference.owner(int(s))]]
    assert any(emptied), "no row whose tokens are all stop ids: nothing was tested there"


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_mask_row_without_finite_allowed_logit_still_gives_an_allowed_token(value: float) -> None:
    """X01: a fully masked row never occurs, whatever a bias, `min_tokens` or the model did to the logits."""
    arena, reference, rows = filled_arena()
    allowed = sorted(reference.allowed(7, rows))
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, allowed] = value
    masked = np.asarray(apply_mask(logits, arena, jnp.array([7, 7])))
    assert kept_ids(masked) == [set(allowed)] * 2
    assert int(argmax(jnp.asarray(masked))[0]) == allowed[0]


def test_mask_of_the_step_replaces_that_of_the_state() -> None:
    arena, reference, rows = filled_arena()
    own = [{4, 9, 40}, {EOS}]
    logits = np.zeros((4, VOCAB), np.float32)
    masks = pack_ids([np.array(sorted(ids)) for ids in own], VOCAB)
    masked = apply_mask(logits, arena, jnp.array([0, 5, 5, 0]), row_masks=masks,
                        mask_places=jnp.array([1, 2, 0, 0]), stop_ids=padded_stop_ids([[], [7], [], [3]]))
    assert kept_ids(np.asarray(masked)) == [own[0], own[1], reference.allowed(5, rows), set(range(VOCAB))]


# -- states

def test_advance_random_walks_equal_the_reference() -> None:
    """Transitions by token and by byte, rejected tokens, and rows without grammar, in one batch."""
    arena, reference, _ = filled_arena()
    rng = np.random.default_rng(5)
    states = np.array([0, 1, *(s for s in range(2, 300) if reference.owner(s))], np.int32)
    live = 0
    for _ in range(12):
        tokens = rng.integers(0, VOCAB, len(states)).astype(np.int32)
        expected = [reference.advance(int(s), int(t)) for s, t in zip(states, tokens)]
        states = np.asarray(advance(arena, states, tokens))
        assert states.tolist() == expected
        live += int((states > ENDED_STATE).sum())
        states = np.where((states == ENDED_STATE) & (rng.random(len(states)) < 0.5), rng.integers(2, 190, len(states)),
                          states).astype(np.int32)
    assert live > 500


def test_advance_special_token_ends_a_grammar_of_bytes() -> None:
    arena, _, _ = filled_arena()
    assert np.asarray(advance(arena, jnp.array([150, 0, 1]), jnp.array([EOS, EOS, EOS]))).tolist() == [1, 0, 1]


# -- uploads

def test_upload_in_blocks_gives_the_arena_of_one_call(small_blocks: None) -> None:
    tables, _ = three_grammars()
    expected, _, _ = filled_arena()
    arena = new_arena()
    assert all(len(list(grammar_blocks(one, SIZES, VOCAB))) > 2 for one in tables)
    for one in reversed(tables):
        arena = upload(arena, one)
    for name, one, other in zip(GrammarArena._fields, arena, expected):
        assert np.array_equal(one, other), name


def test_upload_over_a_freed_range_leaves_the_others_as_they_were(small_blocks: None) -> None:
    arena, _, _ = filled_arena()
    before = jax.tree.map(np.array, arena)
    other, _ = random_tables(2, np.random.default_rng(9), first_state=110, first_transition=1000, num_states=60,
                             num_classes=3, row_ids=[30, 17])
    after = jax.tree.map(np.array, upload(arena, other))
    for name, places in (("state_row", slice(110, 170)), ("state_base", slice(110, 170)), ("mask_rows", [30, 17]),
                         ("state_grammar", slice(110, 170)), ("is_accepting", slice(110, 170)),
                         ("next_state", slice(1000, 1180)), ("classes", 2), ("first_state", 2), ("uses_bytes", 2)):
        old, new = getattr(before, name), getattr(after, name)
        old[places] = new[places]
        assert np.array_equal(old, new), name
    assert (after.next_state[1000:1180].reshape(60, 3) == other.next_state).all()


def test_upload_writes_in_place() -> None:
    arena = new_arena()
    before = [a.unsafe_buffer_pointer() for a in arena]
    arena = upload(arena, three_grammars()[0][0])
    assert [a.unsafe_buffer_pointer() for a in arena] == before


def test_blank_block_changes_nothing() -> None:
    arena, _, _ = filled_arena()
    before = jax.tree.map(np.array, arena)
    assert all(map(np.array_equal, before, write_block(arena, blank_block(SIZES, VOCAB))))


@pytest.mark.parametrize("change, message", [
    (dict(grammar=4), "grammar 4"), (dict(grammar=0), "grammar 0"), (dict(first_state=1), "states 1"),
    (dict(first_state=201), "states 201 to 300, expected 2 to 299"), (dict(first_transition=4101), "transitions 4101"),
    (dict(first_transition=-1), "transitions -1"), (dict(row_ids=np.arange(1, 11)), "row_ids 1 to 10"),
    (dict(row_ids=np.arange(31, 41)), "row_ids 31 to 40"), (dict(state_row=np.full(100, 40)), "state_row 40"),
    (dict(is_accepting=np.zeros(99, bool)), "99 accepting"),
    (dict(classes=np.zeros(50, np.uint16)), "classes of shape"),
    (dict(classes=np.full(VOCAB, 9, np.uint16)), "below 9"),
    (dict(mask_rows=np.zeros((10, 2), np.uint32)), "mask rows"),
    (dict(next_state=np.full((100, 9), 100, np.uint16)), "names state 100"),
    (dict(uses_bytes=True, classes=np.zeros(256, np.uint16)), "token_bytes")])
def test_tables_outside_the_arena_are_refused(change: dict[str, object], message: str) -> None:
    tables = three_grammars()[0][0]
    check_tables(tables, SIZES, vocab_size=VOCAB, has_token_bytes=False)
    with pytest.raises(ValueError, match=message):
        check_tables(tables._replace(**change), SIZES, vocab_size=VOCAB, has_token_bytes=False)


# -- distribution

def test_masked_sample_20000_draws_follow_the_renormalised_softmax() -> None:
    """Two states in one batch, their draws by temperature; nothing outside the mask, frequencies inside it exact."""
    arena, reference, rows = filled_arena()
    states = max(([a, b] for a in range(2, 60) for b in range(200, 260)), key=lambda pair: sum(
        len(reference.allowed(s, rows)) for s in pair))
    rng, num = np.random.default_rng(6), 250
    row, temperature = (rng.normal(size=VOCAB) * 1.5).astype(np.float32), np.float32(1.5)
    row[VALID:] = 1e4
    logits = jnp.asarray(np.broadcast_to(row, (2 * num, VOCAB)))

    @jax.jit
    def draw(position: jax.Array) -> jax.Array:
        full = lambda value, dtype=jnp.float32: jnp.full(2 * num, value, dtype)     # noqa: E731
        inputs = SamplingInputs(full(temperature), full(1), full(0), full(0), full(0), full(1), full(0, jnp.int32),
                                jnp.tile(jnp.array([[3, 4]], jnp.uint32), (2 * num, 1)), position,
                                jnp.full((2 * num, 1), VOCAB, jnp.int32), full(False, bool))
        return sample(grammar.apply_mask(logits, arena, jnp.repeat(jnp.array(states), num)), inputs)

    drawn = np.stack([np.asarray(draw(first + np.arange(2 * num, dtype=np.int32)))
                      for first in range(0, 40_000, 2 * num)])
    for state, tokens in zip(states, (drawn[:, :num].ravel(), drawn[:, num:].ravel())):
        ids = sorted(reference.allowed(state, rows))
        assert len(ids) >= 5 and set(tokens.tolist()) <= set(ids)
        weights = np.exp(row[ids].astype(np.float64) / temperature)
        expected = weights / weights.sum() * tokens.size
        observed = np.bincount(tokens, minlength=VOCAB)[ids]
        chi_square = ((observed - expected) ** 2 / expected).sum()
        assert stats.chi2.sf(chi_square, len(ids) - 1) > 1e-3, (state, chi_square)
