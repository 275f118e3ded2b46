"""Depth-first order of a batch, the trie behind it, and windows over a long stream."""
from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from jradix.sched.order import PrefixNode, depth_first_order, prefix_trie, shared_length, shared_lengths


def random_prompts(seed: int) -> list[list[int]]:
    """Prompts of few different tokens, short and far longer than a comparison key, with equal and empty ones."""
    rng = random.Random(seed)
    heads = [[], [1] * 70, [1] * 300, [rng.randrange(3) for _ in range(200)]]
    return [rng.choice(heads) + [rng.randrange(3) * 70_000 for _ in range(rng.randrange(6))]
            for _ in range(rng.randrange(40))]


def num_computed(prompts: list[list[int]], order: list[int], cache_tokens: int) -> int:
    """Tokens computed by a cache that, after each prompt, keeps no more than its last `cache_tokens` used prefixes."""
    cache: dict[tuple[int, ...], None] = {}
    computed = 0
    for i in order:
        for end in range(1, len(prompts[i]) + 1):
            computed += tuple(prompts[i][:end]) not in cache
        for end in range(len(prompts[i]), 0, -1):      # the longest is evicted first, so what is kept is a tree
            cache.pop(tuple(prompts[i][:end]), None)
            cache[tuple(prompts[i][:end])] = None
        while len(cache) > cache_tokens:
            del cache[next(iter(cache))]
    return computed


@pytest.mark.parametrize("seed", range(30))
def test_order_of_random_prompts_equals_python_sorting(seed):
    prompts = random_prompts(seed)
    expected = sorted(range(len(prompts)), key=prompts.__getitem__)
    assert depth_first_order(prompts) == expected
    assert depth_first_order([np.array(p, np.int32) for p in prompts]) == expected


def test_order_of_equal_prompts_is_their_own_order():
    prompts = [[5] * 64, [5] * 128, [5] * 64, [5] * 128, [5] * 64]
    assert depth_first_order(prompts) == [0, 2, 4, 1, 3]
    assert depth_first_order(prompts, [0, 9, 64, 9, 0]) == [0, 2, 4, 1, 3]


def test_order_of_token_ids_above_a_byte_follows_their_value():
    assert depth_first_order([[256], [1], [2**31 - 1], [65_536], [255]]) == [1, 4, 0, 3, 2]


@pytest.mark.parametrize("seed", range(10))
def test_order_reaches_the_optimum_when_the_cache_holds_the_longest_prompt(seed):
    """SGLang, theorem 3.1; and other orders do not always, or this test would show nothing."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(1, 8))] for _ in range(24)]
    longest = max(map(len, prompts))
    distinct = len({tuple(p[:end]) for p in prompts for end in range(1, len(p) + 1)})
    assert num_computed(prompts, depth_first_order(prompts), longest) == distinct
    assert num_computed(prompts, list(range(24)), longest) > distinct


def test_cached_prefixes_come_first_wherever_prompts_part():
    prompts = [[7, 1, 1], [7, 1, 2], [7, 3], [7, 2, 1], [7, 2, 2], [4]]
    assert depth_first_order(prompts, [1, 1, 1, 1, 3, 0]) == [4, 3, 0, 1, 2, 5]
    assert depth_first_order(prompts, [0] * 6) == depth_first_order(prompts) == [5, 0, 1, 3, 4, 2]


@pytest.mark.parametrize("seed", range(20))
def test_order_with_cached_prefixes_stays_depth_first(seed):
    prompts = random_prompts(seed)
    rng = random.Random(seed)
    order = depth_first_order(prompts, [rng.randrange(len(p) + 1) for p in prompts])
    assert sorted(order) == list(range(len(prompts)))
    closed: set[tuple[int, ...]] = set()
    for a, b in itertools.pairwise(order):
        shared = shared_length(prompts[a], prompts[b])
        assert not any(tuple(prompts[b][:end]) in closed for end in range(1, len(prompts[b]) + 1))
        closed |= {tuple(prompts[a][:end]) for end in range(shared + 1, len(prompts[a]) + 1)}


def test_order_with_too_few_cached_lengths_raises():
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        depth_first_order([[1], [2]], [0])


@pytest.mark.parametrize("differs_at", [0, 1, 63, 64, 65, 191, 192, 500, 999])
def test_shared_length_finds_the_first_difference(differs_at):
    left = list(range(1000))
    right = [*left[:differs_at], -1, *left[differs_at + 1:]]
    assert shared_length(left, np.array(right)) == differs_at
    assert shared_length(left, left[:differs_at]) == differs_at


def nodes(root: PrefixNode) -> Iterator[PrefixNode]:
    yield root
    for child in root.children:
        yield from nodes(child)


@pytest.mark.parametrize("seed", range(20))
def test_trie_counts_what_a_set_of_prefixes_counts(seed):
    prompts = random_prompts(seed)
    order = depth_first_order(prompts)
    shared = shared_lengths(prompts, order)
    root = prefix_trie(prompts, order, shared)
    found = {(node.num_tokens, node.num_prompts) for node in nodes(root)}
    counts: dict[tuple[int, ...], int] = {(): len(prompts)}
    for prompt in prompts:
        for end in range(1, len(prompt) + 1):
            counts[tuple(prompt[:end])] = counts.get(tuple(prompt[:end]), 0) + 1
    assert sum(map(len, prompts)) - shared.sum() == len(counts) - 1
    assert root.num_prompts == len(prompts)
    assert found <= {(len(prefix), count) for prefix, count in counts.items()}
    for node in nodes(root):
        assert node.num_prompts == len(node.ending) + sum(child.num_prompts for child in node.children)
        assert all(child.num_tokens > node.num_tokens for child in node.children)
        assert node is root or node.ending or len(node.children) > 1


def test_order_of_long_nested_prompts_needs_no_recursion():
    tokens = np.arange(100_000, dtype=np.int32)
    prompts = [tokens[:end] for end in range(100_000, 0, -50)]
    assert depth_first_order(prompts, [1] * len(prompts)) == list(range(len(prompts)))[::-1]
