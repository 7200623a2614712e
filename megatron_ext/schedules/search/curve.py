"""The activation curve of a rank's remaining actions, after any out-of-order execution."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

__all__ = ["Curve"]


class Curve:
    """Changes of a count by position, and the maximum of their running sum.

    An action that runs early removes its change, which shifts the rest of the curve. Both
    operations are O(log n): each node of a tree keeps the sum of the changes below it and the
    maximum of their running sum, at least 0.
    """

    def __init__(self, changes: Sequence[float]) -> None:
        self._size = 1
        while self._size < len(changes) + 1:
            self._size *= 2
        padding = [0] * (self._size - len(changes))
        self._sum: list[float] = [0] * self._size + [*changes, *padding]
        self._top: list[float] = [max(0, change) for change in self._sum]
        for node in range(self._size - 1, 0, -1):
            self._pull(node)

    def again(self) -> Curve:
        """Return a curve of its own with the same changes."""
        made = copy(self)
        made._sum, made._top = [*self._sum], [*self._top]
        return made

    def take(self, position: int) -> float:
        """Remove the change at a position, and return it."""
        node = position + self._size
        sums, tops = self._sum, self._top
        change = sums[node]
        if not change:
            return 0
        sums[node] = tops[node] = 0
        while node > 1:
            node >>= 1
            left = node << 1
            sums[node] = sums[left] + sums[left + 1]
            high, low = tops[left], sums[left] + tops[left + 1]
            tops[node] = high if high > low else low
        return change

    def top(self, end: int) -> float:
        """Return the maximum of the running sum before a position, at least 0."""
        node, top = end + self._size, 0.0
        sums, tops = self._sum, self._top
        while node > 1:
            if node & 1:
                top += sums[node - 1]
                if tops[node - 1] > top:
                    top = tops[node - 1]
            node >>= 1
        return top

    def _pull(self, node: int) -> None:
        left, right = 2 * node, 2 * node + 1
        self._sum[node] = self._sum[left] + self._sum[right]
        self._top[node] = max(self._top[left], self._sum[left] + self._top[right])
