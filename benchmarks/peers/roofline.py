"""What a workload must take on this machine: its least arithmetic and memory traffic, at rates measured here.

The model of the cost is that of a decoder with the KV of a cache without limits: each prompt token that is not cached
goes through the layers once and attends to all before it; a decode step reads the weights, and the KV of all tokens
that its rows hold, once. A step takes the longer one of its arithmetic and its reading. Nothing else is counted, so the
share says what is left to win. The rate of arithmetic is that of NumPy's float32 products: an engine whose products
are faster, on a matrix unit say, can pass it.
"""
from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workloads import Request

TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PRODUCT = 512, 1536, 1536     # M, K, N: weights of a layer of a small model, and a chunk of a prompt
READ_BYTES = 2**28
REPEATS = 9

Done = Sequence[tuple[Request, list[int]]]


class Rates(NamedTuple):
    """What the machine does at best: float32 products, and reading from memory."""
    gflop_per_s: float
    gb_per_s: float


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder, as its config.json gives them."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, folder: Path) -> Model:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        return cls(config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"], heads,
                   config["num_key_value_heads"], config.get("head_dim") or config["hidden_size"] // heads,
                   config["vocab_size"])

    @property
    def num_layer_weights(self) -> int:
        """Weights that each token is multiplied with, the head apart."""
        projections = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (projections + 3 * self.hidden * self.intermediate)

    @property
    def num_head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def flop_per_key(self) -> int:
        """Of one query and one key, in all layers: its score, and its part of the sum of values."""
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def num_kv_values(self) -> int:
        """Of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def measure() -> Rates:
    """The best of a few float32 products by NumPy's BLAS, and of a few sums over more memory than any cache holds."""
    rows, inner, columns = PRODUCT
    a, b = np.ones((rows, inner), np.float32), np.ones((inner, columns), np.float32)
    block = np.ones(READ_BYTES // 4, np.float32)
    return Rates(2 * rows * inner * columns / _best(lambda: a @ b) / 1e9, READ_BYTES / _best(lambda: block @ block) / 1e9)


def least_s(batches: Sequence[Done], model: Model, dtype: str, rates: Rates) -> float:
    """Seconds that batches take at least, one after the other, on a cache that is empty before the first.

    Args:
      batches: requests and outputs, as they were submitted together.
      dtype: of weights and KV.
    """
    known: dict[tuple[int, int], int] = {}      # a trie: (node, token) -> node; node 0 is the empty prefix

    def walk(node: int, tokens: Sequence[int]) -> list[int]:
        path = []
        for token in tokens:
            node = known.setdefault((node, token), len(known) + 1)
            path.append(node)
        return path

    seconds = 0.0
    for batch in batches:
        flop, paths = 0, []
        for request, _ in batch:
            num_before = len(known)
            paths.append(walk(0, request.prompt))
            num_new, length = max(len(known) - num_before, 1), len(request.prompt)
            contexts = num_new * (2 * length - num_new + 1) // 2         # new tokens see all up to themselves
            flop += 2 * num_new * model.num_layer_weights + contexts * model.flop_per_key + 2 * model.num_head_weights
        seconds += flop / rates.gflop_per_s / 1e9
        for step in range(1, max(len(output) for _, output in batch)):
            rows = [(path, step) for path, (_, output) in zip(paths, batch) if len(output) > step]
            seconds += _decode_s(rows, model, TYPE_BYTES[dtype], rates)
        for path, (_, output) in zip(paths, batch):
            walk(path[-1], output[:-1])
    return seconds


def _decode_s(rows: Sequence[tuple[list[int], int]], model: Model, type_bytes: int, rates: Rates) -> float:
    """A decode step of rows that hold the nodes of their prompt and some tokens of output."""
    num_kv = len({node for path, _ in rows for node in path}) + sum(step for _, step in rows)
    num_weights = model.num_layer_weights + model.num_head_weights
    flop = 2 * len(rows) * num_weights + model.flop_per_key * sum(len(path) + step for path, step in rows)
    read = type_bytes * (num_weights + num_kv * model.num_kv_values)
    return max(flop / rates.gflop_per_s, read / rates.gb_per_s) / 1e9


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
