"""The order in which a batch of prompts shares most: depth first over the trie of their tokens. NumPy only.

Prompts are not run here, and the tree of the cache is not read: `cached` says what it already holds.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

FIRST_KEY_TOKENS = 64      # the first key compared; most prompts of a batch part within it or share much more


@dataclass(slots=True, eq=False, repr=False)
class PrefixNode:
    """A prefix at which prompts part or end.

    Attributes:
      num_tokens: its length; greater than its parent's, 0 for the root.
      ending: prompts that are exactly this prefix, in order.
      children: longer prefixes, in the order of their tokens.
      num_prompts: prompts that begin with it.
      num_cached: the longest cached prefix among those.
    """
    num_tokens: int
    ending: list[int] = field(default_factory=list)
    children: list[PrefixNode] = field(default_factory=list)
    num_prompts: int = 0
    num_cached: int = 0


def depth_first_order(prompts: Sequence[np.ndarray | Sequence[int]], cached: Sequence[int] | None = None) -> list[int]:
    """Indices of `prompts` in depth-first order over their trie; equal prompts keep their order.

    Run in this order, every shared prefix is computed once even when the cache holds no more than the longest request
    (Zheng et al. 2024, SGLang, theorem 3.1). A prompt comes before those that continue it. Where prompts part, the side
    with the longest cached prefix comes first, before it can be evicted; then the lower token id.

    Cost: about n log n comparisons of the tokens up to where two prompts part; memory for keys is at most as much as
    the prompts take as int32, and much less where they part early. With `cached`, one pass over shared tokens more.

    Args:
      prompts: token ids below 2**31, any lengths.
      cached: tokens of each prompt that a cache holds already; None: nothing is cached.

    Raises:
      ValueError: `cached` has another length than `prompts`.
    """
    if cached is not None and len(cached) != len(prompts):
        raise ValueError(f"cached has {len(cached)} entries for {len(prompts)} prompts: expected one for each")
    order = _by_tokens(prompts)
    if cached is None or not any(cached):
        return order
    root = prefix_trie(prompts, order, shared_lengths(prompts, order), cached)
    found: list[int] = []
    stack = [root]
    while stack:
        node = stack.pop()
        found += node.ending
        stack += sorted(node.children, key=lambda child: -child.num_cached)[::-1]
    return found


def shared_lengths(prompts: Sequence[np.ndarray | Sequence[int]], order: Sequence[int]) -> np.ndarray:
    """int64[n]: how many first tokens prompt `order[k]` has in common with prompt `order[k - 1]`; 0 for the first.

    In the order of their tokens this is what a prompt shares with all before it.
    """
    shared = np.zeros(len(order), np.int64)
    for k in range(1, len(order)):
        shared[k] = shared_length(prompts[order[k - 1]], prompts[order[k]])
    return shared


def shared_length(left: np.ndarray | Sequence[int], right: np.ndarray | Sequence[int]) -> int:
    """How many first tokens two sequences have in common."""
    end = min(len(left), len(right))
    start, width = 0, FIRST_KEY_TOKENS
    while start < end:
        stop = min(start + width, end)
        differs = np.asarray(left[start:stop]) != np.asarray(right[start:stop])
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, width = stop, 2 * width
    return end


def prefix_trie(prompts: Sequence[np.ndarray | Sequence[int]], order: Sequence[int], shared: Sequence[int] | np.ndarray,
                cached: Sequence[int] | None = None) -> PrefixNode:
    """The root of the trie in which only prefixes where prompts part or end are nodes: at most 2 n + 1 of them.

    Args:
      prompts: only their lengths are read.
      order: indices in the order of the prompts' tokens.
      shared: `shared_lengths` of that order.
      cached: as in `depth_first_order`.
    """
    path = [PrefixNode(0)]        # from the root to the prompt before

    def close_down_to(num_tokens: int) -> None:
        while path[-1].num_tokens > num_tokens:
            child = path.pop()
            if path[-1].num_tokens < num_tokens:
                path.append(PrefixNode(num_tokens))
            parent = path[-1]
            parent.children.append(child)
            parent.num_prompts += child.num_prompts
            parent.num_cached = max(parent.num_cached, child.num_cached)

    for index, num_shared in zip(order, shared):
        close_down_to(int(num_shared))
        if len(prompts[index]) > path[-1].num_tokens:
            path.append(PrefixNode(len(prompts[index])))
        node = path[-1]
        node.ending.append(index)
        node.num_prompts += 1
        if cached is not None:
            node.num_cached = max(node.num_cached, int(cached[index]))
    close_down_to(0)
    return path[0]


def _by_tokens(prompts: Sequence[np.ndarray | Sequence[int]]) -> list[int]:
    """Indices in the order of the prompts' tokens: by their first tokens, then runs that agree there by the next ones.

    Big-endian bytes compare as the tokens do, and a prompt sorts before those that continue it.
    """
    order = list(range(len(prompts)))
    runs = [(0, len(order), 0, FIRST_KEY_TOKENS)]     # places, tokens compared already, tokens to compare now
    while runs:
        start, stop, offset, width = runs.pop()
        keys = {i: np.asarray(prompts[i][offset:offset + width]).astype(">i4").tobytes() for i in order[start:stop]}
        order[start:stop] = sorted(order[start:stop], key=keys.__getitem__)
        first = start
        for place in range(start + 1, stop + 1):
            key = keys[order[first]]
            if place == stop or keys[order[place]] != key:
                if place - first > 1 and len(key) == 4 * width:
                    runs.append((first, place, offset + width, 2 * width))
                first = place
    return order
