"""From logits to tokens: penalties, filters, one draw per row, log-probabilities.

Everything works on float32 logits [S, V] inside jit, each row by itself, and nothing sorts the vocabulary. A NaN logit
counts as -inf and +inf as the largest float. A row without any finite logit gives token 0 and log-probability -inf.

**Order of tokens.** Logit descending, then id ascending: ties are always cut in favour of the lowest id. Every filter
keeps a prefix of this order, so it is two numbers per row: a threshold, and the last id kept among the logits equal to
it. The filters run in the order temperature, top_k, top_p, min_p: top_p takes the smallest prefix that reaches its mass
of what top_k left, min_p drops what is below min_p times the best probability.

**Threshold.** It is found by bisection: at most `VALUE_PASSES` passes over the values, then at most 32 over int32 keys
(floats compare like their bit patterns); 10 to 20 are typical. Exact for top_k, up to float32 rounding of the mass for
top_p. The passes first run over the `TOP_BLOCKS` blocks with the best maxima; only rows whose prefix is longer than
that are searched in the whole row.

**Draw.** Weights are summed in a tree of fan-out `FOLD` by explicit pairwise additions, so a row's sums have the same
bits in every batch. At each node the children race with exponential random numbers, which come from Threefry by (seed,
position) alone. A logit that differs in its last bits, as it does with other batch neighbours, then changes the drawn
token only where two children all but tie. Walking down with one uniform number (inverse CDF) adds up the shifts of all
boundaries before it: with noise of 1e-5 on 49,152 logits it changed 48 of 20,000 tokens, this changed none.
"""
from __future__ import annotations

from functools import partial
from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

BLOCK = 64          # neighbouring tokens that share a maximum
TOP_BLOCKS = 64     # blocks searched before the whole row
FOLD = 16           # children of a node of the sum tree
VALUE_PASSES = 16   # bisections by value, before those by key

_LARGEST = float(jnp.finfo(jnp.float32).max)
_SMALLEST_TEMPERATURE = float(jnp.finfo(jnp.float32).tiny)   # below it, backends may flush to zero


class SamplingState(NamedTuple):
    """What the tokens so far say about each row. Kept by slot; gathered to rows by the caller.

    Attributes:
      output_counts: int32[S, V], how often each token is in the output.
      in_prompt: bool[S, V], tokens of the prompt.
      logit_bias: float32[S, V], added to the logits.
    """
    output_counts: Array
    in_prompt: Array
    logit_bias: Array


class SamplingInputs(NamedTuple):
    """Parameters of each row in one step.

    Attributes:
      temperature: float32[S]; 0 is greedy, and so is anything below the smallest normal float32, or NaN.
      top_p, min_p: float32[S]; off at 1 and 0.
      presence_penalty, frequency_penalty, repetition_penalty: float32[S]; off at 0, 0 and 1.
      top_k: int32[S]; <= 0 or >= V: off, 1 is greedy.
      seed: uint32[S, 2], the request's random stream.
      position: int32[S], number of the output token being drawn; (seed, position) decides the draw, nothing else.
      stop_ids: int32[S, n], padded with ids outside the vocabulary.
      suppress_stop: bool[S], True while min_tokens is not reached: stop ids get -inf.
    """
    temperature: Array
    top_p: Array
    min_p: Array
    presence_penalty: Array
    frequency_penalty: Array
    repetition_penalty: Array
    top_k: Array
    seed: Array
    position: Array
    stop_ids: Array
    suppress_stop: Array


class _Prefix(NamedTuple):
    """Tokens with a logit above `threshold` [S], and those equal to it with an id <= `last_id` [S]."""
    threshold: Array
    last_id: Array

    def contains(self, logits: Array, ids: Array) -> Array:
        threshold, last_id = self.threshold[:, None], self.last_id[:, None]
        return (logits > threshold) | ((logits == threshold) & (ids <= last_id))

    def shortened(self, rows: Array, other: _Prefix) -> _Prefix:
        """The shorter of two prefixes in the given rows, this one in the others."""
        higher = rows & (other.threshold > self.threshold)
        same = rows & (other.threshold == self.threshold)
        last_id = jnp.where(same, jnp.minimum(self.last_id, other.last_id), self.last_id)
        return _Prefix(jnp.where(higher, other.threshold, self.threshold), jnp.where(higher, other.last_id, last_id))


class _Bracket(NamedTuple):
    """Keys of two thresholds [S], the weights at and above each [S], rows to go on with [S], passes made so far."""
    low: Array
    high: Array
    sum_low: Array
    sum_high: Array
    is_open: Array
    num_passes: Array


class _Blocks(NamedTuple):
    """The best blocks of each row, in id order: logits and ids [S, num * BLOCK]; every other logit is <= bound [S]."""
    logits: Array
    ids: Array
    bound: Array


_Weigh = Callable[[Array, Array], Array]   # weights of clean logits and their ids, both [S, n]


def argmax(logits: Array) -> Array:
    """The most probable token of each row, int32[S]; the lowest id among equals, 0 for a row without finite logits."""
    return _best(_pad(logits, BLOCK, -jnp.inf))[0]


def adjust_logits(logits: Array, state: SamplingState, inputs: SamplingInputs) -> Array:
    """Applies penalties, then `logit_bias`, then the suppression of stop ids.

    The repetition penalty divides positive and multiplies negative logits of prompt and output tokens (Keskar et al.
    2019, as in Hugging Face); presence and frequency penalties are subtracted for output tokens only (OpenAI). A logit
    of -inf stays -inf, so a grammar mask may be applied before.

    Args:
      logits: float32[S, V].

    Returns:
      float32[S, V].
    """
    counts = state.output_counts
    in_output = counts > 0
    factor = inputs.repetition_penalty[:, None]
    penalised = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(state.in_prompt | in_output, penalised, logits)
    logits = logits - jnp.where(in_output, inputs.presence_penalty[:, None], jnp.float32(0))
    logits = logits - inputs.frequency_penalty[:, None] * counts.astype(jnp.float32)
    logits = logits + state.logit_bias
    num_rows, vocab_size = logits.shape
    stop_ids = jnp.where(inputs.suppress_stop[:, None], inputs.stop_ids, vocab_size)
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    return logits.at[rows, stop_ids].set(-jnp.inf, mode="drop", wrap_negative_indices=False)


def sample(logits: Array, inputs: SamplingInputs) -> Array:
    """Draws one token per row; greedy rows (temperature 0 or top_k 1) take `argmax`.

    Args:
      logits: float32[S, V], already adjusted and masked.

    Returns:
      int32[S]. Never a token whose logit is -inf, unless the whole row is: then 0.

    Costs about four passes over the logits, more for rows whose top_k or top_p keeps very many tokens.
    """
    x = _pad(logits, BLOCK, -jnp.inf)
    best, top = _best(x)
    greedy = _is_greedy(inputs)

    def draw() -> Array:
        weigh = _kept_weights(x, top, inputs, active=~greedy)
        token = _race(x, weigh, partial(_exponentials, inputs.seed, inputs.position), otherwise=best)
        return jnp.where(greedy, best, token)

    return lax.cond(jnp.all(greedy), lambda: best, draw)


def kept_tokens(logits: Array, inputs: SamplingInputs) -> Array:
    """The tokens `sample` can draw, bool[S, V]: exactly one for a greedy row or one without finite logits."""
    x = _pad(logits, BLOCK, -jnp.inf)
    best, top = _best(x)
    ids = _ids(x)
    weigh = _kept_weights(x, top, inputs, active=~_is_greedy(inputs))
    only = _is_greedy(inputs) | (top == -jnp.inf)
    kept = jnp.where(only[:, None], ids == best[:, None], weigh(_clean(x), ids) > 0)
    return kept[:, :logits.shape[1]]


def log_probabilities(logits: Array, tokens: Array, num_top: int) -> tuple[Array, Array, Array, Array]:
    """Log-probabilities of given tokens and of the most probable ones, from the logits as they are.

    Args:
      logits: float32[S, V], raw: before temperature, penalties and masks.
      tokens: int32[S], ids in [0, V).
      num_top: how many of the best tokens to list, 0 to V.

    Returns:
      logprob float32[S], rank int32[S] (1 is best, ties by lowest id), top_ids int32[S, num_top] best first and
      top_logprobs float32[S, num_top].

    Raises:
      ValueError: num_top is outside [0, V].
    """
    vocab_size = logits.shape[1]
    if not 0 <= num_top <= vocab_size:
        raise ValueError(f"num_top={num_top}: expected 0 to {vocab_size}, the number of tokens in the logits")
    padded = _pad(logits, BLOCK, -jnp.inf)
    x = _clean(padded)
    top = _block_maxima(padded).max(axis=1)
    offset = jnp.where(top > -jnp.inf, top, jnp.float32(0))
    total = _row_sums(_fold_weights(padded, lambda part, ids: jnp.exp(part - offset[:, None])))
    log_total = jnp.where(top > -jnp.inf, offset + jnp.log(total), jnp.float32(0))
    chosen = jnp.take_along_axis(x, tokens[:, None], axis=1, mode="clip")
    ahead = (x > chosen) | ((x == chosen) & (_ids(x) < tokens[:, None]))
    rank = 1 + jnp.sum(ahead, axis=1, dtype=jnp.int32)
    top_logits, top_ids = _top(padded, num_top)
    return chosen[:, 0] - log_total, rank, top_ids, top_logits - log_total[:, None]


def _clean(logits: Array) -> Array:
    """Finite or -inf logits without negative zeros. Applied where logits are read, so that no second copy is stored."""
    x = jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, _LARGEST))
    return jnp.where(x == 0, jnp.float32(0), x)


def _pad(values: Array, multiple: int, fill: float) -> Array:
    missing = -values.shape[1] % multiple
    return jnp.pad(values, ((0, 0), (0, missing)), constant_values=fill) if missing else values


def _ids(x: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _is_greedy(inputs: SamplingInputs) -> Array:
    return ~(inputs.temperature >= _SMALLEST_TEMPERATURE) | (inputs.top_k == 1)


def _block_maxima(x: Array) -> Array:
    """Clean maxima [S, N / BLOCK]. A maximum over raw logits is three times faster on CPU and shows NaN as NaN."""
    def maxima(values: Array) -> Array:
        return values.reshape(x.shape[0], -1, BLOCK).max(axis=2)

    def on_cpu(x: Array) -> Array:
        raw = maxima(x)
        return lax.cond(jnp.any(jnp.isnan(raw)), lambda: maxima(_clean(x)), lambda: _clean(raw))

    return lax.platform_dependent(x, cpu=on_cpu, default=lambda x: maxima(_clean(x)))


def _best(x: Array) -> tuple[Array, Array]:
    """Id and logit of each row's best token: the first block with the maximum, then the first token in it."""
    maxima = _block_maxima(x)
    block = jnp.argmax(maxima, axis=1).astype(jnp.int32)
    inside = _gather_blocks(x, block[:, None])
    return block * BLOCK + jnp.argmax(inside, axis=1).astype(jnp.int32), maxima.max(axis=1)


def _gather_blocks(x: Array, blocks: Array) -> Array:
    """Clean logits of the given blocks [S, n], one after the other: [S, n * BLOCK]."""
    num_rows, num = blocks.shape
    num_blocks = x.shape[1] // BLOCK
    flat = blocks + num_blocks * jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    picked = x.reshape(-1, BLOCK).at[flat.reshape(-1)].get(mode="promise_in_bounds")
    return _clean(picked).reshape(num_rows, num * BLOCK)


def _best_blocks(x: Array, num: int) -> _Blocks:
    """The blocks that hold the `num` best tokens: any of them is beaten by fewer than `num` block maxima."""
    maxima = _block_maxima(x)
    num_blocks = maxima.shape[1]
    if num >= num_blocks:
        return _whole_row(x)
    values, blocks = lax.optimization_barrier(lax.top_k(maxima, num + 1))   # a sliced top_k becomes a full sort on CPU
    blocks = jnp.sort(blocks[:, :num], axis=1)
    ids = blocks[:, :, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    return _Blocks(_gather_blocks(x, blocks), ids.reshape(x.shape[0], -1), values[:, num])


def _whole_row(x: Array) -> _Blocks:
    return _Blocks(_clean(x), _ids(x), jnp.full(x.shape[:1], -jnp.inf, jnp.float32))


def _top(x: Array, num: int) -> tuple[Array, Array]:
    """Logits and ids of the `num` best tokens [S, num], best first, ties by lowest id."""
    if num == 0:
        return jnp.zeros((x.shape[0], 0), jnp.float32), jnp.zeros((x.shape[0], 0), jnp.int32)
    blocks = _best_blocks(x, num)
    values, places = lax.top_k(blocks.logits, num)
    return values, jnp.take_along_axis(blocks.ids, places, axis=1, mode="promise_in_bounds")


def _kept_weights(x: Array, top: Array, inputs: SamplingInputs, active: Array) -> _Weigh:
    """Function of clean logits and ids [S, n]: probability relative to the best, 0 for tokens the filters drop.

    Rows that are not active skip the searches.
    """
    everything = _Prefix(jnp.full_like(top, -jnp.inf), jnp.full(top.shape, x.shape[1], jnp.int32))
    by_count = active & (inputs.top_k > 0) & (inputs.top_k < x.shape[1])
    by_mass = active & (inputs.top_p < 1)
    origin = jnp.where(top > -jnp.inf, top, jnp.float32(0))[:, None]
    temperature = jnp.where(active, inputs.temperature, jnp.float32(1))[:, None]

    def relative(logits: Array, ids: Array) -> Array:
        return jnp.exp((logits - origin) / temperature)       # divides: 1 / temperature may overflow

    def weights(prefix: _Prefix, logits: Array, ids: Array) -> Array:
        return jnp.where(prefix.contains(logits, ids), relative(logits, ids), jnp.float32(0))

    def mass(prefix: _Prefix) -> Array:
        return lax.cond(jnp.any(by_count), lambda: _total_weight(x, partial(weights, prefix)),
                        lambda: _total_weight(x, relative))   # all tokens: a third cheaper

    def search() -> _Prefix:
        blocks = _best_blocks(x, TOP_BLOCKS)

        def shorten(by: Array, prefix: _Prefix) -> _Prefix:
            """By number of tokens, then by mass: one loop body, because it is what takes long to compile."""
            def measure(logits: Array, ids: Array) -> Array:
                return jnp.where(by == 0, jnp.float32(1), weights(prefix, logits, ids))
            target = lax.cond(by == 0, lambda: inputs.top_k.astype(jnp.float32),
                              lambda: inputs.top_p * mass(prefix))
            return _search(x, top, blocks, measure, target, jnp.where(by == 0, by_count, by_mass), prefix)

        first = jnp.where(jnp.any(by_count), jnp.int32(0), jnp.int32(1))
        end = jnp.where(jnp.any(by_mass), jnp.int32(2), jnp.int32(1))
        return lax.fori_loop(first, end, shorten, everything)

    kept = lax.cond(jnp.any(by_count | by_mass), search, lambda: everything)

    def weigh(logits: Array, ids: Array) -> Array:
        kept_weights = weights(kept, logits, ids)
        return jnp.where(kept_weights >= inputs.min_p[:, None], kept_weights, jnp.float32(0))

    return weigh


def _search(x: Array, top: Array, blocks: _Blocks, weigh: _Weigh, target: Array, active: Array,
            otherwise: _Prefix) -> _Prefix:
    """Shortest prefix of active rows whose weights sum to `target`; `otherwise` for the other rows."""
    weights = weigh(blocks.logits, blocks.ids)
    above = _row_sums(jnp.where(blocks.logits > blocks.bound[:, None], weights, jnp.float32(0)))
    in_blocks = active & (above >= target)
    prefix = otherwise.shortened(in_blocks, _shortest_prefix(blocks, weigh, top, target, in_blocks))
    elsewhere = active & ~in_blocks & (blocks.bound > -jnp.inf)   # else all live tokens together weigh too little

    def search_all() -> _Prefix:
        return prefix.shortened(elsewhere, _shortest_prefix(_whole_row(x), weigh, top, target, elsewhere))

    return lax.cond(jnp.any(elsewhere), search_all, lambda: prefix)


def _shortest_prefix(blocks: _Blocks, weigh: _Weigh, top: Array, target: Array, active: Array) -> _Prefix:
    """Bisection for the highest threshold whose tokens weigh at least `target`, then the cut among its ties.

    The tokens at `low` and above weigh enough and those at `high` and above too little. When both differ by less than
    the weight of two tokens, one token is left between them and any threshold in between keeps the same set. The first
    passes halve the distance of the logits, which separates distinct tokens soonest; the others halve the distance of
    the keys, which ends on ties too.
    """
    logits = blocks.logits
    weights = weigh(logits, blocks.ids)

    def weight_at(key: Array) -> Array:
        return weigh(_from_key(key)[:, None], jnp.zeros_like(key)[:, None])[:, 0]

    def step(carry: _Bracket) -> _Bracket:
        low, high = carry.low, carry.high
        by_key = (low >> 1) + (high >> 1) + (low & high & 1)
        by_value = _to_key(_from_key(low) * jnp.float32(0.5) + _from_key(high) * jnp.float32(0.5))
        middle = jnp.where(carry.num_passes < VALUE_PASSES, jnp.clip(by_value, low + 1, high - 1), by_key)
        threshold = lax.optimization_barrier(_from_key(middle))   # else it is computed again for every logit
        total = _row_sums(jnp.where(logits >= threshold[:, None], weights, jnp.float32(0)))
        raised, lowered = carry.is_open & (total >= target), carry.is_open & ~(total >= target)
        low, sum_low = jnp.where(raised, middle, low), jnp.where(raised, total, carry.sum_low)
        high, sum_high = jnp.where(lowered, middle, high), jnp.where(lowered, total, carry.sum_high)
        several = sum_low - sum_high >= jnp.float32(1.5) * weight_at(low)
        is_open = carry.is_open & (low + 1 < high) & (sum_low != target) & several
        return _Bracket(low, high, sum_low, sum_high, is_open, carry.num_passes + 1)

    lowest = jnp.maximum(blocks.bound, jnp.min(jnp.where(logits > -jnp.inf, logits, jnp.inf), axis=1))
    low, high = _to_key(lowest), _to_key(top) + 1
    start = _Bracket(low, high, jnp.full_like(target, jnp.inf), jnp.zeros_like(target), active & (low + 1 < high),
                     jnp.int32(0))
    found = lax.while_loop(lambda carry: jnp.any(carry.is_open), step, start)
    threshold = _from_key(found.low)
    weight = weight_at(found.low)
    num = jnp.ceil((target - found.sum_high) / jnp.where(weight > 0, weight, jnp.float32(1)))
    num = jnp.clip(num, 1, logits.shape[1]).astype(jnp.int32)
    tied = (logits == threshold[:, None]).astype(jnp.int32)
    cut = active & (jnp.sum(tied, axis=1) > num)
    return _Prefix(threshold, jnp.where(cut, _nth_id(tied, blocks.ids, num, cut), jnp.iinfo(jnp.int32).max))


def _nth_id(flags: Array, ids: Array, num: Array, active: Array) -> Array:
    """Id of the num-th (from 1) set flag of active rows, by bisection over the ids."""
    def step(bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = lax.optimization_barrier((low + high) >> 1)
        enough = jnp.sum(jnp.where(ids <= middle[:, None], flags, jnp.int32(0)), axis=1) >= num
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    highest = jnp.where(active, ids[:, -1], jnp.int32(0))
    return lax.while_loop(lambda bracket: jnp.any(bracket[0] < bracket[1]), step, (jnp.zeros_like(num), highest))[1]


def _to_key(values: Array) -> Array:
    """Integers that compare like the floats they are made from."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_key(keys: Array) -> Array:
    return lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ 0x7FFFFFFF, keys), jnp.float32)


def _fold(values: Array) -> Array:
    """Sums of FOLD entries each, [S, n] -> [S, ceil(n / FOLD)]; entry j adds those that are j modulo the width."""
    parts = _pad(values, FOLD, 0).reshape(values.shape[0], FOLD, -1)
    while parts.shape[1] > 1:
        half = parts.shape[1] // 2
        parts = parts[:, :half] + parts[:, half:]
    return lax.optimization_barrier(parts[:, 0])   # keeps the next level from being fused into a huge expression


def _fold_weights(x: Array, weigh: _Weigh) -> Array:
    """`_fold` of all weights, which are computed slice by slice and never stored."""
    width = x.shape[1] // FOLD
    ids = lax.broadcasted_iota(jnp.int32, (x.shape[0], width), 1)
    parts = [weigh(_clean(x[:, i * width:(i + 1) * width]), ids + i * width) for i in range(FOLD)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:])]
    return lax.optimization_barrier(parts[0])


def _total_weight(x: Array, weigh: _Weigh) -> Array:
    """Row sums of all weights, [S].

    The second reader of the first level keeps XLA on CPUs from computing that level inside the next one's padding, where
    its exponentials are not vectorised.
    """
    level = _fold_weights(x, weigh)
    return _row_sums(level) + 0 * level[:, 0]


def _row_sums(values: Array) -> Array:
    while values.shape[1] > 1:
        values = _fold(values)
    return values[:, 0]


def _exponentials(seed: Array, position: Array, num: int) -> Array:
    """Exponentially distributed numbers, float32[S, num], from 24 bits of Threefry blocks that `fold_in` computes."""
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    blocks = jnp.arange(-(-num // 2), dtype=jnp.int32)
    words = jax.random.key_data(jax.vmap(lambda key: jax.vmap(partial(jax.random.fold_in, key))(blocks))(keys))
    bits = (words.reshape(words.shape[0], -1)[:, :num] >> 8).astype(jnp.int32).astype(jnp.float32)
    return -jnp.log((bits + 0.5) * jnp.float32(2.0 ** -24))


def _race(x: Array, weigh: _Weigh, exponentials: Callable[[int], Array], otherwise: Array) -> Array:
    """One token per row in proportion to its weight, walking down the tree of sums.

    Of a node's children the one with the largest weight over exponential number wins, which it does in proportion to
    its weight. A child without weight never wins; `otherwise` [S] is the answer for a row without any weight. The
    weights themselves are not stored: those of the last step are computed again.

    Args:
      exponentials: float32[S, n] for a number n.
    """
    levels = [_fold_weights(x, weigh)]
    while levels[-1].shape[1] > 1:
        levels.append(_fold(levels[-1]))
    drawn = exponentials(FOLD * len(levels))
    index = jnp.zeros_like(otherwise)
    weight = levels[-1][:, 0]
    branches = jnp.arange(FOLD, dtype=jnp.int32)
    for depth, level in enumerate((*reversed(levels[:-1]), x)):
        stride = -(-level.shape[1] // FOLD)
        children = index[:, None] + stride * branches
        values = jnp.take_along_axis(level, children, axis=1, mode="fill", fill_value=0)
        if level is x:
            values = weigh(_clean(values), children)
        finish = jnp.where(values > 0, values / drawn[:, FOLD * depth:FOLD * (depth + 1)], -1)
        branch = jnp.argmax(finish, axis=1).astype(jnp.int32)
        weight = jnp.max(jnp.where(branches == branch[:, None], values, jnp.float32(0)), axis=1)
        index = index + stride * branch
    return jnp.where(weight > 0, index, otherwise)
