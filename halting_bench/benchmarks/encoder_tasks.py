"""Procedural tasks for encoders: the label of a position depends on what stands on both sides of it.

| task | a position | its label | difficulty | chance |
|---|---|---|---|---|
| roots | a node of a forest and its parent, as one token (24 node + parent), unordered | its root's own token | depth | .33 |
| expressions | a byte of nested sums, maxima and minima of digits | at a closing bracket, the value | height | ~.15 |

Shapes: B sequences, T tokens.
"""

from collections.abc import Callable

import numpy as np

from halting_bench.benchmarks.base import NOT_SCORED, Direction
from halting_bench.benchmarks.procedural import ProceduralTask

_OPERATIONS: dict[str, Callable[[list[int]], int]] = {"+": lambda values: sum(values) % 10, "^": max, "_": min}


class Roots(ProceduralTask):
    """Pointer forests of 24 nodes and three roots, which are their own parents. A node's label is the token of its root.

    One look tells a node its parent; following the pointers takes as many looks as the node is deep, or about the
    logarithm of that where positions read what others have found out.
    """

    name, tag, chance, direction = "roots", "R", 1 / 3, Direction.BOTH
    bounds, trained = (1, 2, 3, 4, 5, 6, 7, 9), 7
    nodes = 24
    trees = 3
    straight = 0.85
    """Probability that a node is hung below the deepest one of its tree, not below any."""

    def length(self, level: int) -> int:
        return self.nodes

    def generate(self, level: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        deepest, nodes = self.bounds[level], self.nodes
        parent = np.tile(np.arange(nodes), (count, 1))
        root, depth = parent.copy(), np.zeros((count, nodes), np.int64)
        row = np.arange(count)
        for node in range(self.trees, nodes):
            draw = rng.random((count, node))
            straight = rng.random(count) < self.straight
            tree = rng.integers(self.trees, size=count)
            open_to = (root[:, :node] == tree[:, None]) & (depth[:, :node] < deepest)
            preference = np.where(straight[:, None], depth[:, :node] + draw, draw)
            chosen = np.where(open_to, preference, -1.0).argmax(axis=1)
            parent[:, node], root[:, node], depth[:, node] = chosen, root[row, chosen], depth[row, chosen] + 1
        label = rng.permuted(np.tile(np.arange(nodes), (count, 1)), axis=1)
        order = rng.permuted(np.tile(np.arange(nodes), (count, 1)), axis=1)

        def shown(of: np.ndarray) -> np.ndarray:
            return np.take_along_axis(np.take_along_axis(label, of, axis=1), order, axis=1)

        tokens = nodes * shown(np.tile(np.arange(nodes), (count, 1))) + shown(parent)
        difficulty = np.take_along_axis(depth, order, axis=1)
        targets = np.where(difficulty > 0, (nodes + 1) * shown(root), NOT_SCORED)
        return tokens, targets, difficulty


class Expressions(ProceduralTask):
    """Nested operations on digits, ListOps-like. `(+3(^47)1)`: the label of the first `)` is 7, of the second 1.

    `+` sums modulo ten, `^` takes the largest, `_` the smallest of two or three arguments; difficulty is a bracket's height.
    """

    name, tag, chance = "expressions", "E", 0.15
    bounds, trained = (1, 2, 3, 4, 5), 4

    def length(self, level: int) -> int:
        return 16 + 16 * level

    def generate(self, level: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        length = self.length(level)
        tokens = np.full((count, length), ord(" "), np.int64)
        targets, difficulty = np.full((count, length), NOT_SCORED, np.int64), np.zeros((count, length), np.int64)
        for row in range(count):
            place = 0
            while place < length - 5:
                expression: list[tuple[str, int, int]] = []
                self._bracket(self.bounds[level], rng, expression)
                if place + len(expression) > length:  # what is left is filled with the smallest brackets
                    expression.clear()
                    self._bracket(1, rng, expression, arguments=2)
                for byte, value, height in expression:
                    tokens[row, place] = ord(byte)
                    if height:
                        targets[row, place], difficulty[row, place] = ord("0") + value, height
                    place += 1
        return tokens, targets, difficulty

    def _bracket(
        self, height: int, rng: np.random.Generator, out: list[tuple[str, int, int]], arguments: int | None = None
    ) -> int:
        """Appends one bracket of exactly this height: (byte, value, height), height 0 where nothing is asked. Its value."""
        operation = str(rng.choice(list(_OPERATIONS)))
        out += [("(", 0, 0), (operation, 0, 0)]
        count = arguments or int(rng.integers(2, 4))
        high = int(rng.integers(count)) if height > 1 else -1
        values = []
        for index in range(count):
            if index == high:
                values.append(self._bracket(height - 1, rng, out))
            else:
                values.append(int(rng.integers(10)))
                out.append((str(values[-1]), 0, 0))
        value = int(_OPERATIONS[operation](values))
        out.append((")", value, height))
        return value


ENCODER_TASKS: dict[str, type[ProceduralTask]] = {"roots": Roots, "expressions": Expressions}
