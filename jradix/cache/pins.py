"""Pins: prefixes that the user protects from eviction, within a budget, for good or for a time."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable

import numpy as np

from jradix.cache.node import Match, Namespace, Node
from jradix.cache.radix_tree import RadixTree
from jradix.errors import PinError


@dataclass(slots=True, eq=False)
class Pin:
    """A protected prefix.

    Attributes:
      tokens: int32[k], what is protected, as far as it is shared.
      namespace: where.
      node: the locked node of the tree, at the end of the page in which the tokens end.
      ttl_s: seconds it lasts after each use; None: until it is taken back.
      expires_s: when it ends, by the cache's clock.
      owner: whose it is; owners do not see one another's pins.
    """
    tokens: np.ndarray
    namespace: Namespace
    node: Node
    ttl_s: float | None
    expires_s: float
    owner: object = None


class Pins:
    """All pins of a cache. Each holds one lock on the tree.

    Args:
      tree: whose nodes are locked.
      max_pages: the budget, in pages; a page under several pins counts once.
      clock: seconds.
    """

    def __init__(self, tree: RadixTree, max_pages: int, clock: Callable[[], float]):
        self.max_pages = max_pages
        self._tree = tree
        self._clock = clock
        self._pins: list[Pin] = []

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_pages(self) -> int:
        """Pages under a pin."""
        return self._count(self._pins)

    def check(self, num_tokens: int, ttl_s: float | None) -> None:
        """Raises PinError when a prefix of this length, nothing of it pinned yet, is beyond what can be pinned."""
        if ttl_s is not None and not (isinstance(ttl_s, (int, float)) and 0 < ttl_s < math.inf):
            raise PinError(f"ttl_s={ttl_s!r}: expected a positive number of seconds, or None for no end")
        if num_tokens == 0:
            raise PinError("nothing to pin: the prefix has no tokens")
        wanted = -(-num_tokens // self._tree.page_size)
        if wanted > self.max_pages:
            raise PinError(f"a prefix of {num_tokens} tokens takes {wanted} pages, but at most {self.max_pages} may be "
                           "pinned in all; pin a shorter prefix, raise max_pinned_fraction or enlarge the pool")

    def add(self, tokens: np.ndarray, match: Match, num_tokens: int, *, ttl_s: float | None = None,
            owner: object = None) -> Pin:
        """Pins the first `num_tokens` of `tokens`, all of which `match` must have found.

        A second pin of the same tokens by the same owner replaces the first.

        Raises:
          PinError: not all of it is cached, the time to live is no positive number, or the budget is exceeded; the
            message says how much is pinned. Nothing was changed.
        """
        self.check(len(tokens), ttl_s)
        self.expire()
        page_size = self._tree.page_size
        num_found = match.num_tokens + match.num_host_pages * page_size
        if match.partial is not None:
            num_found += match.partial.num_tokens
        if num_found < num_tokens:
            raise PinError(f"only {num_found} of {num_tokens} tokens are cached; compute the prefix first")
        old = self._find(tokens, match.namespace, owner)
        node = self._tree.lock(match, with_partial=True)
        now = self._clock()
        pin = Pin(np.array(tokens, np.int32), match.namespace, node, ttl_s, math.inf if ttl_s is None else now + ttl_s,
                  owner)
        others = [other for other in self._pins if other is not old]
        num_pages = self._count([*others, pin])
        if num_pages > self.max_pages:
            self._tree.unlock(node)
            raise PinError(f"{len(tokens)} tokens would bring the pinned pages from {self._count(self._pins)} to "
                           f"{num_pages}, but at most {self.max_pages} may be pinned; unpin something or raise "
                           "max_pinned_fraction")
        if old is not None:
            self._drop(old)
        self._pins.append(pin)
        return pin

    def remove(self, tokens: np.ndarray, namespace: Namespace, owner: object = None) -> None:
        """Takes a pin back. Raises PinError when its owner has not pinned these tokens."""
        self.expire()
        pin = self._find(tokens, namespace, owner)
        if pin is None:
            raise PinError(f"these {len(tokens)} tokens are not pinned ({len(self._pins)} other pins are)")
        self._drop(pin)

    def clear(self) -> None:
        for pin in list(self._pins):
            self._drop(pin)

    def refresh(self, tokens: np.ndarray, namespace: Namespace) -> None:
        """A request with these tokens came: pins it runs through start their time anew."""
        if not self._pins:
            return
        self.expire()
        now = self._clock()
        for pin in self._pins:
            n = len(pin.tokens)
            if (pin.ttl_s is not None and namespace == pin.namespace and n <= len(tokens)
                    and np.array_equal(tokens[:n], pin.tokens)):
                pin.expires_s = now + pin.ttl_s

    def expire(self) -> None:
        """Drops pins whose time is over; a page that a request holds stays until that ends."""
        if self._pins:
            now = self._clock()
            for pin in [pin for pin in self._pins if pin.expires_s <= now]:
                self._drop(pin)

    def _find(self, tokens: np.ndarray, namespace: Namespace, owner: object) -> Pin | None:
        return next((pin for pin in self._pins if pin.owner is owner and pin.namespace == namespace
                     and np.array_equal(pin.tokens, tokens)), None)

    def _drop(self, pin: Pin) -> None:
        self._pins.remove(pin)
        self._tree.unlock(pin.node)

    @staticmethod
    def _count(pins: list[Pin]) -> int:
        seen: set[Node] = set()
        num_pages = 0
        for pin in pins:
            node = pin.node
            while node is not None and node not in seen:
                seen.add(node)
                num_pages += node.num_pages
                node = node.parent
        return num_pages
