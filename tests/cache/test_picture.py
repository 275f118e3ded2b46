"""Pictures of the prefix cache: what is shown, what is only counted, and that text never runs into text."""
from __future__ import annotations

import dataclasses
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import numpy as np
import pytest

from jradix.cache.node import Namespace, Node
from jradix.cache.picture import tree_svg, tree_text
from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.radix_tree import RadixTree

SVG = "{http://www.w3.org/2000/svg}"
PAGE = 4


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def encode(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def make_cache(num_pages: int = 64, **options: object) -> PrefixCache:
    return PrefixCache.create(page_size=PAGE, num_pages=num_pages, max_pages=num_pages, **{"clock": Clock(), **options})


def run(cache: PrefixCache, text: str, namespace: Namespace = Namespace()) -> None:
    tokens = encode(text)
    lease = cache.acquire(tokens, namespace)
    cache.extend(lease, len(tokens))
    cache.release(lease, tokens)
    cache.take_moves()


def bushy_cache() -> PrefixCache:
    rng = random.Random(7)
    cache = make_cache(4000)
    for _ in range(300):
        run(cache, "".join(rng.choices("abcd", k=rng.randint(1, 40))))
    return cache


def hidden_pages(text: str) -> int:
    return sum(int(n.replace(",", "")) for n in re.findall(r"\+ .* ([\d,]+) pages?$", text, re.MULTILINE))


def shown_nodes(text: str) -> list[list[str]]:
    """Columns of the nodes' lines."""
    lines = (line.rsplit('"', 1)[-1].split() for line in text.splitlines() if re.search(r"(host|device)$", line))
    return [columns for columns in lines]


# -- text


def test_tree_text_of_a_small_tree_is_this() -> None:
    clock = Clock()
    cache = make_cache(clock=clock)
    run(cache, "You are a bot. Hello!")
    run(cache, "You are a bot? Hi!")
    clock.now_s += 5
    run(cache, "Gr\u00fc\u00dfe\n", Namespace(adapter="german"))
    lease = cache.acquire(encode("You are a bot. Hello!!"))
    assert tree_text(cache, decode) == """\
prefix cache: 10 of 64 pages of 4 tokens, 5 of them in use or pinned
                            tokens  pages  refs  hits    age    tier
default namespace                       8     1
└─ "You are a bo"               12      3     1     2  0.0 s  device
   ├─ "t. Hello"                 8      2     1     1  0.0 s  device
   │  └─ "!"                     1      1     0     1  0.0 s  device
   └─ "t? H"                     4      1     0     0    5 s  device
      └─ "i!"                    2      1     0     0    5 s  device
namespace adapter 'german'              2     0
└─ "Grüße\\n"                     8      2     0     0  0.0 s  device"""
    cache.release(lease)


def test_tree_text_of_an_empty_cache_says_so() -> None:
    assert tree_text(make_cache(), decode) == "prefix cache: empty, 64 pages of 4 tokens"
    assert tree_text(make_cache(enabled=False)).endswith("prefix caching is off")


def test_tree_text_without_decoder_shows_ids() -> None:
    cache = make_cache()
    run(cache, "abcdef")
    assert '97 98 99 100' in tree_text(cache)


def test_tree_text_host_tier_and_remembered_nodes_are_told_apart() -> None:
    for num_host_pages, tiers in ((4, ["host", "device", "device"]), (0, ["device", "device"])):
        cache = make_cache(8, num_host_pages=num_host_pages)
        run(cache, "aaaabbbbcccc")
        run(cache, "x" * 30)
        text = tree_text(cache, decode)
        assert sorted(columns[-1] for columns in shown_nodes(text)) == sorted(tiers)
        assert ("3 more in host memory" in text) == bool(num_host_pages)
        assert cache.tree.num_gone_pages == (0 if num_host_pages else 3)      # remembered, and not drawn


@pytest.mark.parametrize("limits", [{}, dict(max_depth=1), dict(max_children=2), dict(max_nodes=5),
                                    dict(max_depth=2, max_children=1), dict(max_depth=99, max_children=999,
                                                                            max_nodes=9999)])
def test_tree_text_shown_and_hidden_pages_add_up(limits: dict[str, int]) -> None:
    cache = bushy_cache()
    text = tree_text(cache, decode, **limits)
    nodes = shown_nodes(text)
    assert sum(int(columns[1]) for columns in nodes) + hidden_pages(text) == cache.tree.num_evictable_pages
    hidden = sum(int(n.replace(",", "")) for n in re.findall(r"\+ ([\d,]+) more", text))
    assert len(nodes) + hidden == sum(1 for _ in cache.tree.nodes())
    assert len(nodes) <= limits.get("max_nodes", 100)
    assert bool(hidden) == (limits.get("max_nodes") != 9999)


def test_tree_text_limits_hold() -> None:
    text = tree_text(bushy_cache(), decode, max_depth=2, max_children=3)
    depths = [(len(line) - len(line.lstrip("│├└─ "))) // 3 for line in text.splitlines() if line[:1] in "│├└ "][1:]
    assert max(depths) == 3 and "+" in text          # the third level only says what is hidden
    assert len(shown_nodes(text)) == 3 + 9


def test_tree_text_largest_subtrees_come_first() -> None:
    cache = make_cache()
    for text in ("small", "large " * 10, "middle " * 3):
        run(cache, text)
    lines = tree_text(cache, decode, max_children=2).splitlines()[3:]
    assert [line[3:9] for line in lines if line[0] != " " and line[0] != "│"] == ['"large', '"middl', "+ 2 mo"]


def test_tree_text_many_namespaces_are_counted() -> None:
    cache = make_cache()
    for i in range(12):
        run(cache, "hello", Namespace(salt=f"user {i}"))
    text = tree_text(cache, decode)
    assert text.count("namespace cache_namespace 'user") == 8 and text.endswith("+ 4 more namespaces, 8 pages")


def test_tree_text_long_and_wide_edge_text_is_cut_to_its_cells() -> None:
    cache = make_cache()
    run(cache, "日本語" * 12)
    run(cache, "plain text " * 12)
    lines = tree_text(cache, decode, max_cells=11).splitlines()
    assert '"日本語日本…" ' in lines[4] + lines[3] and '"plain text…" ' in lines[4] + lines[3]
    assert not any("\ufffd" in line for line in lines)


def test_tree_text_edge_inside_a_character_begins_with_the_whole_one() -> None:
    cache = make_cache()
    run(cache, "ab日本")
    run(cache, "ab日木")
    text = tree_text(cache, decode)
    assert '"ab"' in text and '"日本"' in text and '"日木"' in text and "\ufffd" not in text


@pytest.mark.parametrize("name", ["max_depth", "max_children", "max_nodes", "max_cells"])
def test_tree_text_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0: expected 1 or more"):
        tree_text(make_cache(), decode, **{name: 0})


def test_picture_changes_nothing() -> None:
    cache = bushy_cache()
    slots = [name for name in Node.__slots__ if name not in ("pages", "children", "gone", "parent", "queue")]

    def facts() -> list[object]:
        nodes = [(id(node), [getattr(node, name) for name in slots]) for node in cache.tree.nodes(gone=True)]
        return [nodes, dataclasses.asdict(cache.counters)]

    before = facts()
    tree_text(cache, decode)
    tree_svg(cache, decode)
    assert facts() == before
    cache.check_invariants()


def test_picture_decodes_only_what_it_shows() -> None:
    num_ids = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal num_ids
        num_ids += len(ids)
        return decode(ids)

    cache = make_cache(4000)
    run(cache, "a" * 12_000)
    tree_text(cache, counting)
    assert num_ids < 200


def test_picture_walks_the_tree_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    original = RadixTree.nodes
    monkeypatch.setattr(RadixTree, "nodes", lambda tree, **kw: walks.append(1) or original(tree, **kw))
    tree_text(bushy_cache(), decode)
    assert len(walks) == 1


# -- SVG


def boxes(element: ElementTree.Element, x: float = 0.0, y: float = 0.0, right: float = 1e9
          ) -> list[tuple[float, float, float, float, str]]:
    """(left, top, right, bottom, text) of every text, for a font of 7.3 units a character, cut by its viewport."""
    found = []
    for child in element:
        if child.tag == f"{SVG}svg":
            left = x + float(child.get("x"))
            found += boxes(child, left, y + float(child.get("y")), left + float(child.get("width")))
        elif child.tag == f"{SVG}text":
            start, width = x + float(child.get("x")), 7.3 * len(child.text)
            if child.get("text-anchor") == "end":
                start -= width
            base = y + float(child.get("y"))
            found.append((start, base - 10, min(start + width, right), base + 3, child.text))
    return found


@pytest.mark.parametrize("limits", [{}, dict(max_depth=20, max_nodes=300), dict(max_cells=4), dict(max_cells=90)])
def test_tree_svg_texts_never_overlap_and_stay_inside(limits: dict[str, int]) -> None:
    cache = bushy_cache()
    run(cache, "hello", Namespace("model", 3, "an adapter of a long name", "user of a long name"))
    root = ElementTree.fromstring(tree_svg(cache, decode, **limits))
    _, _, width, height = map(float, root.get("viewBox").split())
    texts = sorted(boxes(root), key=lambda box: (box[1], box[0]))
    assert len(texts) > 30
    for left, top, right, bottom, text in texts:
        assert 0 <= left and right <= width and 0 <= top and bottom <= height, text
    for a, b in zip(texts, texts[1:]):
        assert b[1] >= a[3] or (b[1] == a[1] and b[0] > a[2]), f"{a} runs into {b}"


def test_tree_svg_markup_in_text_is_escaped() -> None:
    cache = make_cache()
    run(cache, "<script>&amp;]]></svg>\x00\x0b\x1b\ufffe")
    run(cache, "x", Namespace(adapter="<b>&'\""))
    svg = tree_svg(cache, decode)
    texts = [text for *_, text in boxes(ElementTree.fromstring(svg))]
    assert '"<script>&amp;]]></svg>\\x00\\x0b\\x1b\\ufffe"' in texts and "<script>" not in svg
    assert any("<b>&" in text for text in texts)


def test_tree_svg_takes_the_colour_of_the_page_and_loads_nothing() -> None:
    svg = tree_svg(bushy_cache(), decode)
    root = ElementTree.fromstring(svg)
    assert root.get("fill") == "currentColor" and root.get("viewBox")
    assert not re.search(r"href|url\(|@import| id=", svg)
    style = root.find(f"{SVG}style").text
    assert set(re.findall(r"([\w:]+)\{color", style)) == {"svg:root"}      # leaves the page's own elements alone
    assert svg.count("http") == 1      # the name of the language


def test_tree_svg_of_an_empty_cache_is_one_line_of_text() -> None:
    texts = boxes(ElementTree.fromstring(tree_svg(make_cache(), decode)))
    assert [text for *_, text in texts] == ["prefix cache: empty, 64 pages of 4 tokens"]


def test_tree_svg_marks_held_nodes_and_tiers() -> None:
    cache = make_cache(8, num_host_pages=8)
    run(cache, "aaaabbbbcccc")
    run(cache, "x" * 24)
    lease = cache.acquire(encode("x" * 25))
    rows = ElementTree.fromstring(tree_svg(cache, decode)).findall(f"{SVG}circle")[:-3]     # without the legend's
    cache.release(lease)
    assert {(circle.get("stroke"), circle.get("fill") != "none") for circle in rows} == {
        ("#0072b2", True), ("#0072b2", False), ("#d55e00", False)}
