"""Which unlocked leaf goes next. The tree removes it; this only orders."""
from __future__ import annotations

import heapq
from collections import deque
from typing import Callable, Protocol


class Evictable(Protocol):
    """What the queue reads and writes of a tree node."""
    last_used: int
    serial: int
    is_queued: bool


class LruQueue:
    """Leaves by time of last use, least recent first.

    A node is in the queue at most once (`is_queued`), with the time it was queued at. A node used since then is queued
    again with its new time when its old entry surfaces, so that a use costs nothing here. Most nodes are queued right
    after their last use and so arrive in order: those stand in a plain queue, O(1) each. The others, such as parents
    that have lost their last child, stand in a heap, O(log n) each.
    """

    def __init__(self) -> None:
        self._in_order: deque[tuple[int, Evictable]] = deque()
        self._heap: list[tuple[int, int, Evictable]] = []

    def __len__(self) -> int:
        return len(self._in_order) + len(self._heap)

    def add(self, node: Evictable) -> None:
        """Queues a node that has become an unlocked leaf."""
        if not node.is_queued:
            node.is_queued = True
            self._push(node)

    def pop(self, is_evictable: Callable[[Evictable], bool]) -> Evictable | None:
        """Takes out the least recently used node for which `is_evictable` holds; the others met are dropped."""
        in_order, heap = self._in_order, self._heap
        while in_order or heap:
            if in_order and (not heap or in_order[0][0] <= heap[0][0]):
                queued_at, node = in_order.popleft()
            else:
                queued_at, _, node = heapq.heappop(heap)
            if is_evictable(node):
                if node.last_used == queued_at:
                    node.is_queued = False
                    return node
                self._push(node)
            else:
                node.is_queued = False
        return None

    def _push(self, node: Evictable) -> None:
        if not self._in_order or node.last_used >= self._in_order[-1][0]:
            self._in_order.append((node.last_used, node))
        else:
            heapq.heappush(self._heap, (node.last_used, node.serial, node))
