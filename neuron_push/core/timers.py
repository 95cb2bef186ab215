"""Deadlines of many sessions, each moved often: O(log n) to move, O(1) to look."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator


class Timers:
    """A heap with lazy deletion. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Hashable]] = []
        self._due_s: dict[Hashable, float] = {}
        self._order = 0

    def set(self, name: Hashable, deadline_s: float) -> None:
        """Move ``name``'s deadline; infinity removes it."""
        if math.isinf(deadline_s):
            self._due_s.pop(name, None)
            return
        if self._due_s.get(name) == deadline_s:
            return
        self._due_s[name] = deadline_s
        self._order += 1
        heapq.heappush(self._heap, (deadline_s, self._order, name))
        if len(self._heap) > 64 + 4 * len(self._due_s):
            self._heap = [entry for entry in self._heap if self._due_s.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def due(self, now_s: float) -> Iterator[Hashable]:
        """Names whose deadline has passed, each removed as it is yielded."""
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, _, name = heapq.heappop(self._heap)
            if self._due_s.get(name) == deadline_s:
                del self._due_s[name]
                yield name

    def __len__(self) -> int:
        return len(self._due_s)
