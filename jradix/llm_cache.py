"""The prefix cache as its user sees it: `llm.cache` pins, evicts, saves, explains and draws."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jradix.cache.explain import Explanation, explain
from jradix.cache.picture import tree_svg, tree_text
from jradix.calls import in_turn
from jradix.errors import EngineError, PinError, RequestError
from jradix.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jradix.cache.node import Namespace
    from jradix.cache.prefix_cache import PrefixCache
    from jradix.llm import LLM

Prefix = str | Sequence[int] | Sequence[Mapping[str, Any]]


class TreePicture:
    """The tree as SVG; a notebook draws it. `str()` is the SVG text."""

    def __init__(self, svg: str):
        self._svg = svg

    def __str__(self) -> str:
        return self._svg

    def _repr_html_(self) -> str:      # not _repr_svg_: as an image it could not take the notebook's text colour
        return self._svg


class LLMCache:
    """The prefix cache of an LLM.

    A prefix is given as text, as token ids, or as chat messages. `cache_namespace` is that of the requests meant.
    """

    def __init__(self, llm: LLM):
        self.turn = llm.turn
        self._llm = llm

    @in_turn
    def pin(self, prefix: Prefix, ttl_s: float | None = None, *, cache_namespace: Any = None, owner: object = None
            ) -> int:
        """Computes a prefix where it is not cached, and protects it from eviction.

        Args:
          prefix: a prefix of prompts to come; messages are rendered without an invitation to answer.
          ttl_s: seconds after the last request through it when the protection ends; None: when `unpin` is called.
          owner: whose pin it is. Pinning again replaces the owner's pin of this prefix; those of others stay.

        Returns:
          Tokens pinned; with `deterministic` those of whole chunks, since no others are shared.

        Raises:
          PinError: beyond the budget (`max_pinned_fraction` of the pool), no positive time, or caching is off.
          RequestError: the prefix cannot be computed.
        """
        tokens, namespace = self._tokens(prefix), self._namespace(cache_namespace)
        cache = self._cache
        if not cache.enabled:
            raise PinError("nothing can be pinned: the prefix cache is off (enable_prefix_caching=False)")
        cache.pins.check(len(tokens), ttl_s)
        params = SamplingParams(max_tokens=0, cache_namespace=cache_namespace)
        self._llm.generate([tokens.tolist()], params, on_error="raise", progress=False)
        cache.pin(tokens, namespace, ttl_s=ttl_s, owner=owner)
        return len(tokens) - len(tokens) % cache.granularity

    @in_turn
    def unpin(self, prefix: Prefix, *, cache_namespace: Any = None, owner: object = None) -> None:
        """Ends the owner's protection of exactly this prefix; it stays cached. Raises PinError when there is none."""
        self._cache.pins.remove(self._tokens(prefix), self._namespace(cache_namespace), owner)

    @in_turn
    def evict(self, prefix: Prefix, *, cache_namespace: Any = None) -> int:
        """Forgets all that begins with a prefix, and the part of the prefix that nothing else shares.

        What running requests or pins hold stays.

        Returns:
          Pages freed.
        """
        return self._cache.evict(self._tokens(prefix), self._namespace(cache_namespace))

    @in_turn
    def clear(self, *, unpin: bool = False) -> int:
        """Empties the cache but for pins.

        Args:
          unpin: the pins go as well.

        Returns:
          Pages freed.

        Raises:
          EngineError: requests are running.
        """
        num_open = self._llm.num_unfinished
        if num_open:
            raise EngineError(f"{num_open} requests are running on the cache; wait for them or abort them "
                              "before clear()")
        return self._cache.clear(unpin=unpin)

    def save(self, path: str | Path) -> int:
        """Writes the cache to a folder that `LLM(..., load_cache=path)` starts from.

        A snapshot that is there is replaced, in one step: at every moment the folder holds the old one or the new one.

        Returns:
          Pages written.

        Raises:
          SnapshotError: the folder cannot be written; what was there is as it was.
        """
        return self._llm.save_cache(Path(path))

    def load(self, path: str | Path) -> int:
        """Adds the content of a saved cache, as far as the pool has room; returns the pages loaded.

        Raises:
          SnapshotError: damaged, or of another model, tokenizer, type or page size; the cache is as it was.
        """
        return self._llm.load_cache(Path(path))

    @in_turn
    def explain(self, prompt: Prefix, *, cache_namespace: Any = None) -> Explanation:
        """Why a prompt would be found in the cache as far as it would, and no further. Changes nothing."""
        tokens = self._tokens(prompt, add_generation_prompt=True)
        return explain(self._cache, tokens, self._namespace(cache_namespace), self._decode)

    @in_turn
    def show(self, *, max_depth: int = 6, max_children: int = 8) -> TreePicture:
        """A picture of the tree: text, tokens, pages, reference counts, age and hits of each edge."""
        return TreePicture(tree_svg(self._cache, self._decode, max_depth=max_depth, max_children=max_children))

    @in_turn
    def __str__(self) -> str:
        return tree_text(self._cache, self._decode)

    def _repr_html_(self) -> str:
        return str(self.show())

    @property
    def _cache(self) -> PrefixCache:
        return self._llm.prefix_cache

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._llm.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _namespace(self, cache_namespace: Any) -> Namespace:
        return self._llm.namespace(SamplingParams(cache_namespace=cache_namespace))

    def _tokens(self, prefix: Prefix, *, add_generation_prompt: bool = False) -> np.ndarray:
        if not isinstance(prefix, str) and len(prefix) and isinstance(prefix[0], Mapping):
            ids = self._llm.render_chat(prefix, add_generation_prompt=add_generation_prompt)
        else:
            ids = self._llm.encode(prefix)
        try:
            return np.array(ids, np.int32)
        except (ValueError, TypeError, OverflowError):
            raise RequestError("token ids: expected a flat list of integers") from None
