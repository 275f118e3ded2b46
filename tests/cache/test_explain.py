"""Explanations of cache hits and misses, against what an acquire finds and all sequences that the tree knows."""
from __future__ import annotations

import dataclasses
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import numpy as np
import pytest

from jradix.cache.explain import Explanation, MissReason, duration, explain, texts_after, visible
from jradix.cache.node import Namespace, Node
from jradix.cache.prefix_cache import PrefixCache

NAMESPACE = Namespace()
PAGE = 4


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def encode(text: str) -> np.ndarray:
    """One token per byte of UTF-8, so that characters may span tokens, pages and nodes."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def make_cache(num_pages: int = 64, *, page_size: int = PAGE, num_host_pages: int = 0, enabled: bool = True,
               clock: Clock | None = None) -> PrefixCache:
    return PrefixCache.create(page_size=page_size, num_pages=num_pages, max_pages=num_pages, enabled=enabled,
                              num_host_pages=num_host_pages, clock=clock or Clock())


def run(cache: PrefixCache, text: str | np.ndarray, namespace: Namespace | None = NAMESPACE) -> int:
    """A request from begin to end; returns the tokens it found in the cache."""
    tokens = encode(text) if isinstance(text, str) else text
    lease = cache.acquire(tokens, namespace)
    cache.extend(lease, len(tokens))
    cache.release(lease, tokens)
    cache.take_moves()
    return lease.num_cached_tokens


def fill(cache: PrefixCache) -> None:
    """Evicts all else from the device."""
    run(cache, np.full(cache.num_pages * PAGE, 255, np.int32), Namespace(salt="filler"))


def said(cache: PrefixCache, text: str, namespace: Namespace | None = NAMESPACE) -> Explanation:
    return explain(cache, encode(text), namespace, decode)


# -- how much is found


def test_explain_shared_prefix_counts_to_the_last_token() -> None:
    cache = make_cache()
    run(cache, "You are a bot. What is 2+2?")
    explanation = said(cache, "You are a bot. What is 2+5, then?")
    assert (explanation.num_tokens, explanation.num_cached_tokens, explanation.num_host_tokens) == (33, 25, 0)
    assert explanation.reason == "never seen"


def test_explain_whole_prompt_is_capped_at_all_but_the_last_token() -> None:
    cache = make_cache()
    run(cache, "the same prompt")
    explanation = said(cache, "the same prompt")
    assert explanation.num_cached_tokens == 14 and explanation.reason == "whole prompt cached"
    assert explanation.divergence is None and explanation.eviction is None


def test_explain_last_token_differs_is_still_the_whole_prompt() -> None:
    cache = make_cache()
    run(cache, "the same promptX")
    explanation = said(cache, "the same promptY")
    assert explanation.reason is MissReason.WHOLE_PROMPT_CACHED
    assert explanation.divergence.position == 15 and explanation.divergence.theirs == "X"


def test_explain_host_tier_counts_whole_pages_and_the_partial_one() -> None:
    cache = make_cache(16, num_host_pages=64)
    run(cache, "0123456789")
    fill(cache)
    explanation = said(cache, "0123456789 and more")
    assert (explanation.num_cached_tokens, explanation.num_host_tokens) == (10, 10)
    assert explanation.eviction is None and "10 of them in host memory" in str(explanation)


def test_explain_running_request_offers_the_page_it_is_writing() -> None:
    cache = make_cache()
    lease = cache.acquire(encode("abcdefX"))
    cache.extend(lease, 7)
    cache.commit(lease, encode("abcdefX"))
    explanation = said(cache, "abcdefY and so on")
    assert explanation.num_cached_tokens == 6 == run(cache, "abcdefY and so on")
    assert explanation.divergence.position == 6 and explanation.divergence.theirs == ""


@pytest.mark.parametrize("num_host_pages", [0, 24])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_explain_random_traffic_agrees_with_acquire_and_with_all_known_sequences(page_size: int, num_host_pages: int
                                                                                 ) -> None:
    rng = random.Random(page_size + num_host_pages)
    cache = make_cache(60 // page_size, page_size=page_size, num_host_pages=num_host_pages)
    namespaces = [NAMESPACE, Namespace(adapter="a"), Namespace(salt=("b", 1))]
    seen: set[str] = set()
    for _ in range(250):
        tokens = np.array(rng.choices((1, 2), k=rng.randint(1, 14)), np.int32)
        namespace = rng.choice(namespaces)
        explanation = explain(cache, tokens, namespace)
        known = {node: cache.tree.tokens_of(node) for node in cache.tree.nodes(gone=True)}
        common = {node: common_prefix(tokens, sequence) for node, sequence in known.items()}
        own = [n for node, n in common.items() if cache.tree.namespace_of(node) == namespace]
        here = {node: n for node, n in common.items() if node.tier < 2 and cache.tree.namespace_of(node) != namespace}
        position = explanation.divergence.position if explanation.divergence else len(tokens)
        assert position == max(own, default=0)
        if explanation.divergence and explanation.divergence.their_tokens:
            shown = (*tokens[:position].tolist(), *explanation.divergence.their_tokens)
            assert any(tuple(sequence[:len(shown)].tolist()) == shown for node, sequence in known.items()
                       if cache.tree.namespace_of(node) == namespace)
        best_elsewhere = min(max(here.values(), default=0), len(tokens) - 1)
        if best_elsewhere > explanation.num_cached_tokens:
            assert explanation.other_namespace.num_tokens == best_elsewhere
        else:
            assert explanation.other_namespace is None
        num_known = explanation.num_cached_tokens + (explanation.eviction.num_tokens if explanation.eviction else 0)
        assert num_known == min(position, len(tokens) - 1)
        assert run(cache, tokens, namespace) == explanation.num_cached_tokens
        seen.add(explanation.reason)
    assert seen == {"never seen", "evicted", "other namespace", "whole prompt cached"}


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


# -- why the rest is missing


@pytest.mark.parametrize("num_host_pages", [0, 32])
def test_explain_hits_by_chunks_agree_with_acquire(num_host_pages: int) -> None:
    random = np.random.default_rng(4)
    cache = make_cache(40, num_host_pages=num_host_pages)
    cache.granularity = 2 * PAGE
    for _ in range(60):
        base = random.integers(0, 3, int(random.integers(1, 30))).astype(np.int32)
        explanation = explain(cache, base, NAMESPACE)
        assert 0 <= explanation.num_host_tokens <= explanation.num_cached_tokens
        assert explanation.num_cached_tokens + explanation.num_unused_tokens < len(base)
        assert explanation.num_new_tokens >= 1 and explanation.sentences()
        assert explanation.num_cached_tokens == cache.num_matching_tokens(base, NAMESPACE)
        lease = cache.acquire(base, NAMESPACE)
        assert lease.num_cached_tokens == explanation.num_cached_tokens and lease.num_cached_tokens % (2 * PAGE) == 0
        cache.extend(lease, len(base))
        cache.release(lease, base[:len(base) // (2 * PAGE) * 2 * PAGE])
        cache.take_moves()
        cache.check_invariants()


def test_explain_evicted_part_of_a_chunk_is_never_a_hit() -> None:
    cache = make_cache(16)
    cache.granularity = 4 * PAGE
    text = "abcdefghijklmnopqrstuvwxyz0123456789"[:4 * PAGE]
    run(cache, text)
    fill(cache)
    explanation = said(cache, text[:-1] + "!")
    assert explanation.eviction is None and explanation.num_unused_tokens == len(text) - 1
    lease = cache.acquire(encode(text[:-1] + "!"), NAMESPACE)
    assert lease.num_evicted_tokens == 0
    cache.release(lease)
    assert said(cache, text + "!").eviction.num_tokens == len(text)


def test_explain_evicted_prefix_names_policy_age_and_tokens() -> None:
    clock = Clock()
    cache = make_cache(16, clock=clock)
    run(cache, "a long conversation")
    fill(cache)
    clock.now_s += 12
    explanation = said(cache, "a long conversation goes on")
    assert explanation.reason == "evicted" and explanation.num_cached_tokens == 0
    assert dataclasses.astuple(explanation.eviction) == (19, 12.0, "lru")
    assert "The next 19 tokens had been cached and were evicted 12 s ago by the lru policy." in str(explanation)
    assert explanation.divergence.position == 19 and explanation.divergence.ours == " goes on"


def test_explain_evicted_by_the_user_says_so() -> None:
    cache = make_cache()
    run(cache, "forget me please")
    cache.evict(encode("forget me please"))
    explanation = said(cache, "forget me please")
    assert explanation.reason == "evicted" and "by the user" in str(explanation)


def test_explain_few_evicted_tokens_shared_by_chance_is_never_seen() -> None:
    cache = make_cache(16)
    run(cache, "The weather is fine")
    fill(cache)
    explanation = said(cache, "They never met again in all these years")
    assert explanation.eviction.num_tokens == 3 and explanation.reason == "never seen"


def test_explain_other_namespace_names_it_and_its_tokens() -> None:
    cache = make_cache()
    run(cache, "You are a bot. Hello!", Namespace(adapter="german"))
    run(cache, "You are", Namespace(adapter="french"))
    explanation = said(cache, "You are a bot. Hi!")
    assert explanation.reason == "other namespace" and explanation.num_cached_tokens == 0
    assert explanation.other_namespace.namespace == Namespace(adapter="german")
    assert explanation.other_namespace.num_tokens == 16
    assert "adapter 'german' instead of None" in str(explanation)
    assert "nothing is known in its namespace" in str(explanation)


def test_explain_other_namespace_with_a_shorter_match_is_not_mentioned() -> None:
    cache = make_cache()
    run(cache, "You are a bot. Hello!")
    run(cache, "You are", Namespace(adapter="french"))
    assert said(cache, "You are a bot. Hi!").other_namespace is None


@pytest.mark.parametrize("enabled, namespace", [(False, NAMESPACE), (True, None)])
def test_explain_nothing_shared_says_caching_is_off(enabled: bool, namespace: Namespace | None) -> None:
    cache = make_cache(enabled=enabled)
    run(cache, "the same prompt")
    explanation = said(cache, "the same prompt", namespace)
    assert explanation.reason == "caching off" and explanation.num_cached_tokens == 0
    assert "caching is off" in str(explanation)


def test_explain_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        explain(make_cache(), [])


# -- where it diverges


def test_divergence_shows_both_sides_after_common_context() -> None:
    cache = make_cache()
    run(cache, "Answer briefly. Today is Monday, and all is well.")
    divergence = said(cache, "Answer briefly. Today is Friday, and all is well.").divergence
    assert (divergence.position, divergence.context) == (25, "ay is ")
    assert (divergence.ours, divergence.theirs) == ("Friday, ", "Monday, ")


@pytest.mark.parametrize("theirs, ours", [("Zoë", "Zoé"), ("日本", "日木"), ("👍🏽", "👎🏽"), ("naïve", "na")])
def test_divergence_inside_a_character_shows_whole_characters(theirs: str, ours: str) -> None:
    cache = make_cache()
    run(cache, f"Wörter, mehr Wörter: {theirs}.")
    divergence = said(cache, f"Wörter, mehr Wörter: {ours}.").divergence
    for text in (divergence.context, divergence.ours, divergence.theirs):
        assert "\ufffd" not in text
    whole = f"Wörter, mehr Wörter: {ours}."
    assert (divergence.context + divergence.ours) in whole and divergence.ours[0] != divergence.theirs[0]
    assert whole.index(divergence.context + divergence.ours) > 0


def test_divergence_of_many_questions_shows_the_latest_and_counts_the_rest() -> None:
    cache = make_cache()
    for question in ("why?", "when?", "who?"):
        run(cache, f"Tell me: {question}")
    divergence = said(cache, "Tell me: how?").divergence
    assert divergence.theirs == "who?" and divergence.num_others == 2
    assert "one of 3" in str(divergence)


def test_divergence_from_an_evicted_sequence_is_marked() -> None:
    cache = make_cache(16)
    run(cache, "one two three")
    fill(cache)
    divergence = said(cache, "one two four").divergence
    assert divergence.is_evicted and divergence.theirs == "three" and "nearest evicted sequence" in str(divergence)


def test_divergence_where_the_known_sequence_ends_has_no_other_side() -> None:
    cache = make_cache()
    run(cache, "a turn")
    divergence = said(cache, "a turn and the next").divergence
    assert divergence.their_tokens == () and "what is known ends there" in str(divergence)


def test_divergence_without_decoder_shows_ids() -> None:
    cache = make_cache()
    run(cache, np.array([1, 2, 3, 4, 5, 6, 7], np.int32))
    explanation = explain(cache, [1, 2, 3, 4, 5, 9, 9])
    assert explanation.divergence.context is None
    assert "goes on with [9, 9], the nearest cached sequence with [6, 7]" in str(explanation)


def test_divergence_of_equal_text_in_other_tokens_shows_the_ids() -> None:
    pieces = {1: "he", 2: "llo", 3: "hello", 4: "say "}
    cache = make_cache()
    run(cache, np.array([4, 1, 2, 4], np.int32))
    explanation = explain(cache, [4, 3, 4], decode=lambda ids: "".join(pieces[i] for i in ids))
    assert '"hellosay " [3, 4]' in str(explanation) and '"hellosay " [1, 2, 4]' in str(explanation)


def test_divergence_on_an_evicted_branch_longer_than_a_living_one_is_found() -> None:
    cache = make_cache(16)
    run(cache, "aaaabbbbcccc")
    fill(cache)
    run(cache, "aaaabb")
    explanation = said(cache, "aaaabbbbccZZ")
    assert explanation.num_cached_tokens == 6 and explanation.eviction.num_tokens == 4
    assert explanation.divergence.position == 10 and explanation.divergence.theirs == "cc"


# -- reading only


def facts(cache: PrefixCache) -> list[object]:
    slots = [name for name in Node.__slots__ if name not in ("pages", "children", "gone", "parent", "queue")]
    nodes = [(id(node), id(node.parent), id(node.queue), node.pages.tolist(), [getattr(node, name) for name in slots])
             for node in cache.tree.nodes(gone=True)]
    return [nodes, list(cache.tree.roots), dataclasses.asdict(cache.counters)]


def test_explain_changes_nothing() -> None:
    cache = make_cache(16, num_host_pages=4)
    for text in ("You are a bot. Hello!", "You are a bot. Hi!", "something else"):
        run(cache, text)
    run(cache, "You are a bot. Hello!", Namespace(adapter="a"))
    before = facts(cache)
    for text in ("You are a bot. Hello!", "You are a bat", "unknown", "You are a bot. Hi! And"):
        for namespace in (NAMESPACE, Namespace(adapter="a"), Namespace(adapter="none")):
            str(said(cache, text, namespace))
    assert facts(cache) == before and cache.take_moves() == []
    cache.check_invariants()


# -- words


def test_explanation_html_is_well_formed_and_escaped() -> None:
    cache = make_cache()
    run(cache, "text: <b>&one")
    markup = said(cache, "text: <b>&two")._repr_html_()
    assert ElementTree.fromstring(markup).tag == "div"
    assert "<b>" not in markup and "&lt;b&gt;&amp;&quot;, the prompt goes on" in markup


@pytest.mark.parametrize("seconds, text", [(0.04, "0.0 s"), (12.3, "12 s"), (119, "119 s"), (300, "5 min"),
                                           (7300, "2 h"), (3 * 86400, "3 d")])
def test_duration_is_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_visible_text_stays_on_one_line_without_control_characters() -> None:
    assert visible("a\nb\x1b[0m\u202e") == "a\\nb\\x1b[0m\\u202e" and visible("日本 né") == "日本 né"


def test_texts_after_a_broken_character_gives_it_to_the_tails() -> None:
    head, tail_a, tail_b = "né".encode()[:2], "né".encode()[2:] + b"!", "nè".encode()[2:]
    assert texts_after(decode, list(head), list(tail_a), list(tail_b)) == ("n", ["é!", "è"])
