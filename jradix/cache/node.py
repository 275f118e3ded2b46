"""What the radix tree is made of: nodes, their tiers, the namespaces they stand under; and what it answers."""
from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np
from sortedcontainers import SortedDict

TOKEN_BYTES = 4


class Namespace(NamedTuple):
    """What must be equal beside the tokens before KV may be shared. Fields are never joined into one string.

    Attributes:
      salt: a user's own `cache_namespace`: a string or a tuple of strings and integers.
    """
    model: str = ""
    weights_version: int = 0
    adapter: str | None = None
    salt: str | tuple | None = None


class Tier(enum.IntEnum):
    """Where a node's KV is. A child's tier is never smaller than its parent's."""
    DEVICE = 0
    HOST = 1
    GONE = 2


DEVICE, HOST, GONE = Tier
USER = "user"     # evicted_by, where it was no policy


class Node:
    """One edge and the point it leads to.

    Invariants: every node but a root has at least one page; a locked node's ancestors are locked; `last_used` of a node
    is not older than that of its children.
    """
    __slots__ = ("key", "pages", "num_pages", "tier", "parent", "children", "gone", "num_device_children", "lock_count",
                 "last_used", "used_s", "created_s", "hits", "serial", "queue", "is_protected", "evicted_s",
                 "evicted_by", "going")

    def __init__(self, key: bytes, pages: np.ndarray, parent: Node | None, serial: int, last_used: int, now: float):
        self.key = key                        # tokens of the edge, big-endian
        self.pages = pages                    # int32[G, n]: ids of the tier's pool; [G, 0] when gone
        self.num_pages = pages.shape[1]
        self.tier = DEVICE
        self.parent = parent                  # None: a root, or no longer in the tree
        self.children: SortedDict | None = None    # first page's tokens -> Node on device or host; None for none
        self.gone: dict[bytes, Node] | None = None    # the same for nodes that are gone, in no order
        self.num_device_children = 0
        self.lock_count = 0
        self.last_used = last_used            # ticks of the tree's clock
        self.used_s = now
        self.created_s = now
        self.hits = 0                         # uses since it was first inserted
        self.serial = serial
        self.queue: Any = None                # the eviction queue that has its live entry
        self.is_protected = False             # of the eviction policy
        self.evicted_s = 0.0
        self.evicted_by = ""
        self.going = -1                       # number of its latest going; -1 while it is here

    def add_child(self, first: bytes, child: Node) -> None:
        if child.tier is GONE:
            if self.gone is None:
                self.gone = {}
            self.gone[first] = child
            return
        if self.children is None:
            self.children = SortedDict()
        self.children[first] = child
        self.num_device_children += child.tier is DEVICE

    def remove_child(self, first: bytes, child: Node) -> None:
        if child.tier is GONE:
            del self.gone[first]
            self.gone = self.gone or None
            return
        del self.children[first]
        self.children = self.children or None
        self.num_device_children -= child.tier is DEVICE


class Partial(NamedTuple):
    """A page that goes on with the query for some of its tokens.

    Attributes:
      node: the node that has the page.
      page_index: which of its pages.
      num_tokens: how many leading tokens of it agree, fewer than a page.
    """
    node: Node
    page_index: int
    num_tokens: int


class Match(NamedTuple):
    """The longest cached prefix. It is good until the tree changes.

    Attributes:
      node: the last node on the path whose KV exists, None when the namespace is unknown.
      num_node_pages: how many of that node's pages belong to the match.
      pages: int32[G, n], the match's pages on the device, in order.
      num_tokens: n * page_size.
      namespace: the namespace that was searched.
      num_host_pages: whole pages that follow on the host.
      partial: the page that goes on from there, if any.
      num_gone_tokens: tokens beyond the whole pages, in whole pages, whose KV was evicted for want of room.
    """
    node: Node | None
    num_node_pages: int
    pages: np.ndarray
    num_tokens: int
    namespace: Namespace
    num_host_pages: int = 0
    partial: Partial | None = None
    num_gone_tokens: int = 0


class Inserted(NamedTuple):
    """What an insertion did.

    Attributes:
      match: the inserted sequence as a match that `lock` takes; its pages are those from `below` on.
      num_existing_pages: leading pages that the device had already; the caller still owns its own copies of these.
    """
    match: Match
    num_existing_pages: int
