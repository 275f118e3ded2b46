"""Sampling ops against float64 NumPy: kept sets, distributions, penalties, log-probabilities, edge rows."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from jradix.ops import sampling
from jradix.batch import NUM_STOP_IDS
from jradix.ops.sampling import SamplingInputs, SamplingState

MASS_EPS = 4e-6   # float32 exp and a sum tree of a few thousand terms, relative to the total
sample = jax.jit(sampling.sample)
kept_tokens = jax.jit(sampling.kept_tokens)
adjust_logits = jax.jit(sampling.adjust_logits)
argmax = jax.jit(sampling.argmax)
log_probabilities = jax.jit(sampling.log_probabilities, static_argnums=2)


def make_inputs(num_rows: int, vocab_size: int, **fields: object) -> SamplingInputs:
    """Neutral inputs at temperature 1, one seed for all rows; `fields` are scalars or one value per row."""
    neutral = dict(temperature=1.0, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
                   repetition_penalty=1.0, top_k=0, position=0, suppress_stop=False)
    dtypes = dict(top_k=np.int32, position=np.int32, suppress_stop=np.bool_)
    columns = {name: jnp.asarray(np.broadcast_to(np.asarray(fields.get(name, value), dtypes.get(name, np.float32)),
                                                 (num_rows,))) for name, value in neutral.items()}
    seed = jnp.asarray(np.broadcast_to(np.asarray(fields.get("seed", (7, 11)), np.uint32), (num_rows, 2)))
    stop_ids = jnp.asarray(fields.get("stop_ids", np.full((num_rows, NUM_STOP_IDS), vocab_size)), jnp.int32)
    return SamplingInputs(seed=seed, stop_ids=stop_ids, **columns)


def make_state(num_rows: int, vocab_size: int) -> SamplingState:
    shape = (num_rows, vocab_size)
    return SamplingState(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32))


def draw(row: object, num: int, *, first: int = 0, **fields: object) -> np.ndarray:
    """Draws at positions first to first + num - 1 of one stream. Few distinct `num` keep compilations few."""
    row = np.asarray(row, np.float32)
    logits = jnp.asarray(np.broadcast_to(row, (num, row.size)))
    return np.asarray(sample(logits, make_inputs(num, row.size, position=first + np.arange(num), **fields)))


def keep(row: np.ndarray, **fields: object) -> np.ndarray:
    """Ids kept of one row."""
    return np.flatnonzero(np.asarray(kept_tokens(jnp.asarray(row[None]), make_inputs(1, row.size, **fields)))[0])


def order_of(row: np.ndarray) -> np.ndarray:
    return np.lexsort((np.arange(row.size), -row.astype(np.float64)))


def weights_of(row: np.ndarray, temperature: float) -> np.ndarray:
    return np.exp((row.astype(np.float64) - row.max()) / float(np.float32(temperature)))


def oracle_kept(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Kept tokens by sorting, in float64."""
    order, weights = order_of(row), weights_of(row, temperature)
    if 0 < top_k < row.size:
        order = order[:top_k]
    if top_p < 1:
        mass = np.cumsum(weights[order])
        order = order[:np.searchsorted(mass, float(np.float32(top_p)) * mass[-1]) + 1]
    kept = np.zeros(row.size, bool)
    kept[order[weights[order] >= float(np.float32(min_p))]] = True
    return kept & (weights > 0)


def assert_kept_matches_oracle(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """The kept set is a prefix of the order; where top_p cuts it, rounding of the mass may change its length."""
    inputs = make_inputs(1, row.size, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = np.asarray(kept_tokens(jnp.asarray(row[None]), inputs))[0]
    order, weights = order_of(row), weights_of(row, temperature)
    num = int(kept.sum())
    assert num >= 1 and kept[order[:num]].all(), "not a prefix of (logit descending, id ascending)"
    limit = order if not 0 < top_k < row.size else order[:top_k]
    assert num <= limit.size
    total = weights[limit].sum()
    slack, target = MASS_EPS * total, float(np.float32(top_p)) * total
    visible = weights[order] > 1e-30    # float32 underflow drops tokens that no draw could reach
    long_enough = num == int((visible & (np.arange(row.size) < limit.size)).sum()) or top_p < 1
    after_min_p = weights[order[num]] < min_p * (1 + 1e-5) + 1e-30 if num < row.size else True
    assert after_min_p or (long_enough and (top_p >= 1 or weights[order[:num]].sum() >= target - slack))
    assert (weights[order[:num]] >= min_p * (1 - 1e-5)).all()
    if top_p < 1 and num > 1:
        assert weights[order[:num - 1]].sum() < target + slack, "longer than the mass asks for"


def assert_distributed(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    assert (probabilities[tokens] > 0).all(), "drew a token of probability zero"
    observed = np.bincount(tokens, minlength=probabilities.size).astype(np.float64)
    order = np.argsort(-probabilities)
    expected, observed = probabilities[order] * tokens.size, observed[order]
    large = int((expected >= 5).sum())
    expected = np.append(expected[:large], expected[large:].sum())
    observed = np.append(observed[:large], observed[large:].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(chi_square, max(expected.size - 1, 1)) > 1e-3, (chi_square, expected.size)


# --- best token ---

def test_argmax_ties_lowest_id_wins() -> None:
    logits = np.zeros((3, 1000), np.float32)
    logits[0, [999, 130, 131]] = 2
    logits[1, :500] = -0.0      # equal to the +0 behind it
    logits[2, [64, 63]] = np.inf
    assert np.asarray(argmax(jnp.asarray(logits))).tolist() == [130, 0, 63]


def test_argmax_nan_and_masked_rows_are_defined() -> None:
    logits = np.full((3, 300), -np.inf, np.float32)
    logits[1] = np.nan
    logits[2, :200], logits[2, 210] = np.nan, -5
    assert np.asarray(argmax(jnp.asarray(logits))).tolist() == [0, 0, 210]


def test_argmax_random_rows_equal_numpy() -> None:
    for vocab_size in (1, 64, 4097):
        logits = np.random.default_rng(vocab_size).integers(-50, 50, (9, vocab_size)).astype(np.float32)
        assert np.asarray(argmax(jnp.asarray(logits))).tolist() == logits.argmax(1).tolist()


# --- kept sets ---

@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.0, 0.5, 3.0, 30.0]), grid=st.sampled_from([0.0, 0.25]),
       masked=st.sampled_from([0.0, 0.5, 0.98]), temperature=st.sampled_from([0.3, 1.0, 2.5]),
       top_k=st.sampled_from([0, 2, 5, 40, 199, 200]), top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
       min_p=st.sampled_from([0.0, 0.01, 0.4, 1.0]))
def test_kept_tokens_any_filters_equal_sorted_oracle(seed: int, scale: float, grid: float, masked: float,
                                                     temperature: float, top_k: int, top_p: float,
                                                     min_p: float) -> None:
    rng = np.random.default_rng(seed)
    row = (rng.normal(size=200) * scale).astype(np.float32)
    if grid:
        row = np.round(row / grid).astype(np.float32) * np.float32(grid)    # many ties
    row[1:][rng.random(199) < masked] = -np.inf
    assert_kept_matches_oracle(row, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("top_k", [2, 50, 64, 65, 700, 8999])
@pytest.mark.parametrize("grid", [None, 0.5])
def test_top_k_large_vocabulary_keeps_exactly_k(top_k: int, grid: float | None) -> None:
    row = (np.random.default_rng(3).normal(size=9000) * 3).astype(np.float32)
    if grid:
        row = np.round(row / np.float32(grid)) * np.float32(grid)
    assert keep(row, top_k=top_k).tolist() == sorted(order_of(row)[:top_k])


@pytest.mark.parametrize("scale", [0.01, 3.0, 12.0])    # whole row searched, mixed, best blocks only
@pytest.mark.parametrize("top_k, top_p, min_p", [(0, 0.9, 0.0), (0, 0.05, 0.0), (300, 0.8, 0.0), (0, 1.0, 0.02),
                                                 (500, 0.95, 0.05)])
def test_kept_tokens_large_vocabulary_equals_sorted_oracle(scale: float, top_k: int, top_p: float,
                                                           min_p: float) -> None:
    row = (np.random.default_rng(4).normal(size=9000) * scale).astype(np.float32)
    assert_kept_matches_oracle(row, 1.0, top_k, top_p, min_p)


def test_top_k_above_the_number_of_allowed_tokens_keeps_all_of_them() -> None:
    row = np.full(9000, -np.inf, np.float32)
    row[[5, 77, 8999]] = [1.0, -3.0, 1.0]
    assert keep(row, top_k=50).tolist() == [5, 77, 8999]
    assert keep(row, top_k=50, top_p=0.9).tolist() == [5, 8999]


def test_top_p_equal_logits_keeps_lowest_ids() -> None:
    assert keep(np.zeros(9000, np.float32), top_p=0.25).tolist() == list(range(2250))


def test_top_p_ties_at_the_top_k_cut_stay_inside_top_k() -> None:
    row = np.zeros(9000, np.float32)
    row[300] = 0.1
    assert keep(row, top_k=4, top_p=0.999999).tolist() == [0, 1, 2, 300]


# --- distributions ---

@pytest.mark.parametrize("temperature, top_k, top_p, min_p", [
    (1.0, 0, 1.0, 0.0), (0.7, 12, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1), (0.9, 30, 0.9, 0.05)])
def test_sample_20000_draws_follow_the_exact_distribution(temperature: float, top_k: int, top_p: float,
                                                          min_p: float) -> None:
    row = (np.random.default_rng(5).normal(size=64) * 1.5).astype(np.float32)
    row[::7] = -np.inf
    fields = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens = np.concatenate([draw(row, 200, first=first, **fields) for first in range(0, 20_000, 200)])
    probabilities = weights_of(row, temperature) * oracle_kept(row, temperature, top_k, top_p, min_p)
    assert_distributed(tokens, probabilities / probabilities.sum())


def test_sample_large_vocabulary_follows_the_exact_distribution() -> None:
    row = (np.random.default_rng(6).normal(size=5003) * 2).astype(np.float32)
    tokens = np.concatenate([draw(row, 500, first=first) for first in range(0, 20_000, 500)])
    probabilities = weights_of(row, 1.0)
    assert_distributed(tokens, probabilities / probabilities.sum())


def test_sample_token_without_weight_is_never_drawn() -> None:
    """Few live tokens in a sea of -inf, at the extremes of the exponential numbers."""
    row = jnp.full((4, 4096), -jnp.inf, jnp.float32).at[:, jnp.array([17, 2000, 4095])].set(jnp.array([0.0, -90, -80]))
    extremes = jnp.array([2**-25, 0.7, 17.0, 1e-30], jnp.float32)
    walk = jax.jit(lambda x, e: sampling._race(x, lambda logits, ids: jnp.exp(logits),
                                               lambda num: jnp.broadcast_to(e[:, None], (4, num)),
                                               otherwise=jnp.full(4, -1, jnp.int32)))
    assert set(np.asarray(walk(row, extremes)).tolist()) <= {17, 2000, 4095}


PINNED = [[0.030512761, 1.6753289, 1.1546054],
          [0.32813355, 1.494043, 0.60953683],
          [0.36431652, 0.28003147, 0.22549987]]


def test_exponentials_known_streams_give_pinned_numbers() -> None:
    """Integer arithmetic up to one logarithm, so these hold on every backend, in every configuration of jax.random."""
    seed = jnp.array([[0, 0], [1, 2], [2**32 - 1, 5]], jnp.uint32)
    position = jnp.array([0, 1, 1000], jnp.int32)
    plain = np.asarray(sampling._exponentials(seed, position, 3))
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        other = np.asarray(jax.jit(sampling._exponentials, static_argnums=2)(seed, position, 3))
    np.testing.assert_allclose(plain, PINNED, rtol=1e-6)
    np.testing.assert_allclose(other, PINNED, rtol=1e-6)


def test_sample_slightly_other_logits_rarely_change_the_token() -> None:
    """Batch neighbours change the last bits of a row: of 20,000 draws from a flat row at most 20 may differ."""
    rng = np.random.default_rng(8)
    row = (rng.normal(size=4096) * 1.5).astype(np.float32)
    noisy = row + (rng.normal(size=4096) * 1e-5).astype(np.float32)
    changed = sum(int((draw(row, 500, first=first) != draw(noisy, 500, first=first)).sum())
                  for first in range(0, 20_000, 500))
    assert changed <= 20


# --- streams and rows ---

def test_sample_seeds_reproduce_and_differ() -> None:
    """P01: samples of one prompt draw their own streams; the same seed gives the same tokens again."""
    streams = [draw(np.zeros(64), 200, seed=(7, child))[:8].tolist() for child in range(4)]
    again = [draw(np.zeros(64), 200, seed=(7, child))[:8].tolist() for child in range(4)]
    assert streams == again
    assert all(streams[i] != streams[j] for i in range(4) for j in range(i))


def test_sample_row_is_the_same_in_any_batch() -> None:
    rng = np.random.default_rng(8)
    logits = (rng.normal(size=(12, 5000)) * 3).astype(np.float32)
    fields = dict(temperature=rng.choice([0.0, 0.5, 1.0, 3.0], 12), top_k=rng.choice([0, 1, 40, 3000], 12),
                  top_p=rng.choice([0.5, 0.95, 1.0], 12), min_p=rng.choice([0.0, 0.05], 12),
                  seed=rng.integers(0, 2**32, (12, 2), dtype=np.uint32), position=rng.integers(0, 99, 12))

    def tokens_of(rows: list[int]) -> list[int]:
        picked = make_inputs(len(rows), 5000, **{name: value[rows] for name, value in fields.items()})
        return np.asarray(sample(jnp.asarray(logits[rows]), picked)).tolist()

    alone = [tokens_of([i])[0] for i in range(12)]
    for _ in range(4):
        rows = rng.permutation(12)[:4].tolist()
        assert tokens_of(rows) == [alone[i] for i in rows]


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf, 1e30])
def test_sample_garbage_in_other_rows_changes_nothing(fill: float) -> None:
    """N05: what a padding row holds cannot reach a live row."""
    logits = (np.random.default_rng(9).normal(size=(4, 5000)) * 3).astype(np.float32)
    inputs = make_inputs(4, 5000, temperature=[1, 1, 0, 1], top_k=[0, 50, 0, 4000], top_p=[0.9, 1, 1, 0.99])
    dirty = logits.copy()
    dirty[1] = fill
    live = [0, 2, 3]
    clean_tokens, dirty_tokens = (np.asarray(sample(jnp.asarray(x), inputs)) for x in (logits, dirty))
    assert clean_tokens[live].tolist() == dirty_tokens[live].tolist()
    assert 0 <= dirty_tokens[1] < 5000
    tokens = jnp.asarray([3, 4, 5, 6], jnp.int32)
    for one, two in zip(log_probabilities(jnp.asarray(logits), tokens, 5),
                        log_probabilities(jnp.asarray(dirty), tokens, 5)):
        assert np.array_equal(np.asarray(one)[live], np.asarray(two)[live])
        assert not np.isnan(np.asarray(two)).any()


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0.0}])
def test_sample_fully_masked_row_gives_token_zero(fields: dict[str, float]) -> None:
    assert draw(np.full(5000, -np.inf), 4, **fields).tolist() == [0, 0, 0, 0]
    assert keep(np.full(9000, -np.inf, np.float32), **fields).tolist() == [0]


def test_sample_single_allowed_token_is_always_drawn() -> None:
    row = np.full(5000, -np.inf)
    row[4321] = -1e30
    for fields in ({}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 1.0}, {"temperature": 1e-8}):
        assert set(draw(row, 4, **fields).tolist()) == {4321}


# --- temperature and top_k ---

@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-38, 0.0])
def test_sample_tiny_temperature_equals_argmax(temperature: float, top_p: float) -> None:
    """P04: no overflow, no NaN, the best token every time."""
    row = [50, 49.9, -50] + [-np.inf] * 61
    assert set(draw(row, 200, temperature=temperature, top_p=top_p).tolist()) == {0}
    assert set(draw(row[::-1], 200, temperature=temperature, top_p=top_p).tolist()) == {63}


def test_sample_neutral_parameters_draw_many_tokens() -> None:
    """P06: temperature 1 alone is not greedy."""
    assert len(set(draw(np.zeros(64), 200).tolist())) >= 30


def test_sample_off_spellings_of_top_k_are_equal() -> None:
    """P06: 0, -1, the vocabulary size and anything above it are off; 1 is greedy."""
    row = np.random.default_rng(1).normal(size=64)
    expected = draw(row, 200, top_k=0).tolist()
    for top_k in (-1, 64, 1000, 2**31 - 1, -(2**31)):
        assert draw(row, 200, top_k=top_k).tolist() == expected
    assert set(draw(row, 200, top_k=1).tolist()) == {int(row.astype(np.float32).argmax())}


# --- adjustment ---

def test_adjust_repetition_penalty_known_logits_follow_the_rule() -> None:
    """P07: +2 becomes 2 / 1.5 and -2 becomes -2 * 1.5, for prompt and for output tokens, nothing else moves."""
    row = np.array([[2, -2, 2, -2, 2, -2, -np.inf]], np.float32)
    state = make_state(1, 7)._replace(in_prompt=jnp.array([[1, 1, 0, 0, 0, 0, 1]], bool),
                                      output_counts=jnp.array([[0, 0, 3, 1, 0, 0, 0]], jnp.int32))
    out = np.asarray(adjust_logits(jnp.asarray(row), state, make_inputs(1, 7, repetition_penalty=1.5)))
    np.testing.assert_allclose(out, [[2 / 1.5, -3, 2 / 1.5, -3, 2, -2, -np.inf]], rtol=1e-6)


def test_adjust_presence_and_frequency_count_output_only() -> None:
    """P07: each penalty changes what its definition says."""
    state = make_state(2, 4)._replace(in_prompt=jnp.array([[1, 0, 0, 0]] * 2, bool),
                                      output_counts=jnp.array([[0, 1, 3, 0]] * 2, jnp.int32))
    inputs = make_inputs(2, 4, presence_penalty=[0.5, 0], frequency_penalty=[0, 0.25])
    out = np.asarray(adjust_logits(jnp.ones((2, 4), jnp.float32), state, inputs))
    np.testing.assert_array_equal(out, [[1, 0.5, 0.5, 1], [1, 0.75, 0.25, 1]])


def test_adjust_bias_is_added_after_the_penalties() -> None:
    """P07: the bias is not scaled by the repetition penalty."""
    state = make_state(1, 3)._replace(in_prompt=jnp.ones((1, 3), bool),
                                      logit_bias=jnp.array([[0, 10, -np.inf]], jnp.float32))
    out = np.asarray(adjust_logits(jnp.full((1, 3), 2, jnp.float32), state, make_inputs(1, 3, repetition_penalty=2.0)))
    np.testing.assert_array_equal(out, [[1, 11, -np.inf]])


def test_adjust_stop_ids_suppressed_only_where_asked() -> None:
    stop_ids = np.full((3, NUM_STOP_IDS), 10)
    stop_ids[:, :2] = [2, 9]
    stop_ids[2, 2:4] = [-1, 2**31 - 1]      # outside the vocabulary: nothing wraps to the last token
    stop_ids[2, 1] = 10
    inputs = make_inputs(3, 10, suppress_stop=[True, False, True], stop_ids=stop_ids)
    out = np.asarray(adjust_logits(jnp.zeros((3, 10), jnp.float32), make_state(3, 10), inputs))
    assert [np.flatnonzero(row == -np.inf).tolist() for row in out] == [[2, 9], [], [2]]


def test_adjust_neutral_inputs_keep_every_bit() -> None:
    logits = np.random.default_rng(2).normal(size=(3, 500)).astype(np.float32)
    state = make_state(3, 500)._replace(in_prompt=jnp.ones((3, 500), bool), output_counts=jnp.ones((3, 500), jnp.int32))
    assert np.array_equal(np.asarray(adjust_logits(jnp.asarray(logits), state, make_inputs(3, 500))), logits)


# --- log-probabilities ---

@pytest.mark.parametrize("vocab_size", [64, 5003])
def test_log_probabilities_equal_float64_oracle(vocab_size: int) -> None:
    """P10: natural logarithms of the softmax of the raw logits; the chosen token may lie outside the top."""
    rng = np.random.default_rng(10)
    logits = (rng.normal(size=(6, vocab_size)) * 4).astype(np.float32)
    tokens = rng.integers(0, vocab_size, 6).astype(np.int32)
    logprob, rank, top_ids, top_logprobs = map(np.asarray, log_probabilities(jnp.asarray(logits), tokens, 20))
    exact = logits.astype(np.float64)
    exact = exact - exact.max(1, keepdims=True)
    exact = exact - np.log(np.exp(exact).sum(1, keepdims=True))
    for i in range(6):
        order = order_of(logits[i])
        assert rank[i] == 1 + np.flatnonzero(order == tokens[i])[0]
        assert top_ids[i].tolist() == order[:20].tolist()
        np.testing.assert_allclose(logprob[i], exact[i, tokens[i]], atol=1e-5)
        np.testing.assert_allclose(top_logprobs[i], exact[i, order[:20]], atol=1e-5)


def test_log_probabilities_ties_rank_by_lowest_id() -> None:
    logits = np.round(np.random.default_rng(11).normal(size=(2, 5000))).astype(np.float32)
    logits[1, :2500] = -0.0
    logits[1, 2500:] = 0.0
    _, rank, top_ids, _ = map(np.asarray, log_probabilities(jnp.asarray(logits), jnp.array([4999, 4999]), 20))
    for i in range(2):
        order = order_of(logits[i])
        assert top_ids[i].tolist() == order[:20].tolist()
        assert rank[i] == 1 + np.flatnonzero(order == 4999)[0]


def test_log_probabilities_ignore_how_the_token_was_drawn() -> None:
    """P10: the values are those of the raw logits whatever temperature, top_p or mask drew the token."""
    logits = jnp.asarray(np.random.default_rng(12).normal(size=(4, 5000)), jnp.float32)
    mask = jnp.full((4, 5000), -jnp.inf, jnp.float32).at[:, 123].set(0)
    token = sample(logits + mask, make_inputs(4, 5000, temperature=[0.5, 1, 2, 0], top_p=[0.1, 1, 0.1, 0.1]))
    assert np.asarray(token).tolist() == [123] * 4
    exact = np.asarray(logits, np.float64)
    logprob, _, top_ids, _ = map(np.asarray, log_probabilities(logits, token, 5))
    np.testing.assert_allclose(logprob, exact[:, 123] - np.log(np.exp(exact).sum(1)), atol=1e-5)
    assert not (top_ids == 123).any()


def test_log_probabilities_masked_and_nan_rows_have_no_nan() -> None:
    logits = np.full((3, 500), -np.inf, np.float32)
    logits[1] = np.nan
    logits[2, 7] = 3
    out = log_probabilities(jnp.asarray(logits), jnp.array([5, 5, 7]), 3)
    logprob, rank, top_ids, top_logprobs = map(np.asarray, out)
    assert logprob.tolist() == [-np.inf, -np.inf, 0.0] and rank.tolist() == [6, 6, 1]
    assert top_ids.tolist() == [[0, 1, 2], [0, 1, 2], [7, 0, 1]]
    assert not np.isnan(top_logprobs).any()


def test_log_probabilities_num_top_zero_lists_nothing() -> None:
    out = log_probabilities(jnp.zeros((2, 70), jnp.float32), jnp.zeros(2, jnp.int32), 0)
    assert out[2].shape == out[3].shape == (2, 0)


def test_log_probabilities_num_top_above_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_top=71: expected 0 to 70"):
        sampling.log_probabilities(jnp.zeros((2, 70), jnp.float32), jnp.zeros(2, jnp.int32), 71)


# --- backends ---

@pytest.mark.parametrize("platform, vocab_size", [("cuda", 49152), ("tpu", 50257)])    # 50257 is padded to blocks
def test_ops_lower_for_accelerators(platform: str, vocab_size: int) -> None:
    rows = 8
    logits = jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32)
    tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)
    inputs = jax.eval_shape(lambda: make_inputs(rows, vocab_size))
    state = jax.eval_shape(lambda: make_state(rows, vocab_size))
    with jax.numpy_dtype_promotion("strict"):
        for op, args in ((sampling.argmax, (logits,)), (sampling.sample, (logits, inputs)),
                         (sampling.adjust_logits, (logits, state, inputs)), (sampling.kept_tokens, (logits, inputs)),
                         (lambda x, t: sampling.log_probabilities(x, t, 20), (logits, tokens))):
            lowered = jax.jit(op).trace(*args).lower(lowering_platforms=(platform,))
            assert "stablehlo" in lowered.as_text()
