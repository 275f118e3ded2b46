"""Which unlocked leaf goes next. The tree removes it; this only orders."""
from __future__ import annotations

import heapq
from typing import Callable, Protocol


class Evictable(Protocol):
    """What the queue reads and writes of a tree node."""
    last_used: int
    serial: int
    is_queued: bool


class LruQueue:
    """Leaves by time of last use, least recent first, in O(log n) amortised per victim.

    A node is in the heap at most once (`is_queued`). Its entry keeps the time it was queued with; a node used since
    then is pushed back with its new time when the old entry surfaces, so that a use costs nothing here.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Evictable]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, node: Evictable) -> None:
        """Queues a node that has become an unlocked leaf."""
        if not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._heap, (node.last_used, node.serial, node))

    def pop(self, is_evictable: Callable[[Evictable], bool]) -> Evictable | None:
        """Takes out the least recently used node for which `is_evictable` holds; the others met are dropped."""
        heap = self._heap
        while heap:
            queued_at, _, node = heap[0]
            if not is_evictable(node):
                heapq.heappop(heap)
                node.is_queued = False
            elif node.last_used != queued_at:
                heapq.heapreplace(heap, (node.last_used, node.serial, node))
            else:
                heapq.heappop(heap)
                node.is_queued = False
                return node
        return None
