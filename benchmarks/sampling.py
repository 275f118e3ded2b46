"""Micro-benchmark of the sampling ops: one JSON line per op, with the plain JAX way measured in the same run.

    python benchmarks/sampling.py [--rows 8] [--vocab-size 49152] [--repeats 30]
"""
from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jradix.ops import sampling
from jradix.batch import NUM_STOP_IDS
from jradix.ops.sampling import SamplingInputs, SamplingState


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    for num_rows in arguments.rows:
        for line in measure_rows(num_rows, arguments.vocab_size, arguments.repeats):
            print(json.dumps(line), flush=True)


def measure_rows(num_rows: int, vocab_size: int, repeats: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    wide = jnp.asarray(rng.normal(size=(num_rows, vocab_size)) * 3, jnp.float32)       # nucleus of thousands of tokens
    peaked = wide.at[:, ::max(vocab_size // 50, 1)].add(14)                             # nucleus of a few dozen
    tokens = jnp.zeros(num_rows, jnp.int32)
    shape = wide.shape
    state = SamplingState(jnp.ones(shape, jnp.int32), jnp.ones(shape, bool), jnp.zeros(shape, jnp.float32))

    def inputs(**fields: float) -> SamplingInputs:
        return make_inputs(num_rows, vocab_size, **fields)

    cases: list[tuple[str, Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = [
        ("argmax", sampling.argmax, argmax_plain, (peaked,)),
        ("adjust_logits", sampling.adjust_logits, add_bias_only, (peaked, state, inputs(repetition_penalty=1.1))),
        ("sample greedy", sampling.sample, sample_by_sort, (peaked, inputs(temperature=0.0))),
        ("sample plain", sampling.sample, sample_by_gumbel, (peaked, inputs())),
        ("sample top_k=50", sampling.sample, sample_by_sort, (peaked, inputs(top_k=50))),
        ("sample top_p=0.9 peaked", sampling.sample, sample_by_sort, (peaked, inputs(top_p=0.9))),
        ("sample top_p=0.9 wide", sampling.sample, sample_by_sort, (wide, inputs(top_p=0.9))),
        ("sample top_k=50 top_p=0.9", sampling.sample, sample_by_sort, (peaked, inputs(top_k=50, top_p=0.9))),
        ("top 20", lambda x: sampling._top(x, 20), top_k_plain, (peaked,)),
        ("log_probabilities 20", lambda x: sampling.log_probabilities(x, tokens, 20), log_probabilities_plain,
         (peaked,)),
    ]
    lines = []
    for name, op, baseline, args in cases:
        line: dict[str, Any] = dict(op=name, rows=num_rows, vocab_size=vocab_size, device=jax.devices()[0].device_kind)
        line |= {f"{key}_ms": value for key, value in time_op(op, args, repeats).items()}
        line |= {f"baseline_{key}_ms": value for key, value in time_op(baseline, args, repeats).items()}
        line["baseline"] = baseline.__name__
        lines.append(line)
    return lines


def make_inputs(num_rows: int, vocab_size: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0,
                repetition_penalty: float = 1.0) -> SamplingInputs:
    def column(value: float) -> Array:
        return jnp.full(num_rows, value, jnp.float32)

    return SamplingInputs(
        temperature=column(temperature), top_p=column(top_p), min_p=column(0), presence_penalty=column(0),
        frequency_penalty=column(0), repetition_penalty=column(repetition_penalty),
        top_k=jnp.full(num_rows, top_k, jnp.int32), seed=jnp.arange(2 * num_rows, dtype=jnp.uint32).reshape(-1, 2),
        position=jnp.zeros(num_rows, jnp.int32), stop_ids=jnp.full((num_rows, NUM_STOP_IDS), vocab_size, jnp.int32),
        suppress_stop=jnp.zeros(num_rows, bool))


def argmax_plain(logits: Array) -> Array:
    return jnp.argmax(logits, axis=1)


def add_bias_only(logits: Array, state: SamplingState, inputs: SamplingInputs) -> Array:
    """The least an adjustment can do: one pass over logits and bias."""
    return logits + state.logit_bias


def top_k_plain(logits: Array) -> tuple[Array, Array]:
    values, ids = lax.top_k(logits, 20)
    return values, ids


def sample_by_gumbel(logits: Array, inputs: SamplingInputs) -> Array:
    return jax.random.categorical(jax.random.key(0), logits / inputs.temperature[:, None], axis=1)


def sample_by_sort(logits: Array, inputs: SamplingInputs) -> Array:
    """The usual way: sort the vocabulary, cut by rank and by cumulative mass, draw among what is left."""
    temperature = jnp.maximum(inputs.temperature, jnp.float32(1e-6))[:, None]
    ids = jnp.argsort(-logits, axis=1)
    ordered = jnp.take_along_axis(logits, ids, axis=1) / temperature
    rank = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    ordered = jnp.where((rank < inputs.top_k[:, None]) | (inputs.top_k[:, None] <= 0), ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=1)
    before = jnp.cumsum(probabilities, axis=1) - probabilities
    ordered = jnp.where(before < inputs.top_p[:, None], ordered, -jnp.inf)
    place = jax.random.categorical(jax.random.key(0), ordered, axis=1)
    return jnp.take_along_axis(ids, place[:, None], axis=1)[:, 0]


def log_probabilities_plain(logits: Array) -> tuple[Array, Array]:
    return lax.top_k(jax.nn.log_softmax(logits, axis=1), 20)


def time_op(op: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> dict[str, float]:
    """Median and 90th percentile of the blocked call in milliseconds, and the first call apart."""
    function = jax.jit(op)
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    first = time.perf_counter() - start
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return dict(median=round(statistics.median(times) * 1e3, 3), p90=round(float(np.quantile(times, 0.9)) * 1e3, 3),
                first_call=round(first * 1e3, 1))


if __name__ == "__main__":
    main()
