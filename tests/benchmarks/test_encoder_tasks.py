"""The encoder tasks, checked against straightforward solvers."""

import numpy as np
import pytest

from halting_bench.benchmarks.base import NOT_SCORED
from halting_bench.benchmarks.encoder_tasks import ENCODER_TASKS, Expressions, Roots


@pytest.mark.parametrize("level", range(8))
def test_following_the_pointers_gives_the_root_and_the_depth(level: int) -> None:
    task = Roots()
    tokens, targets, depths = task.generate(level, 20, np.random.default_rng(level))
    for row, wanted, depth in zip(tokens, targets, depths, strict=True):
        parent = dict(divmod(token, 24) for token in row.tolist())
        assert sorted(parent) == list(range(24))
        assert sum(node == up for node, up in parent.items()) == 3
        for token, target, steps in zip(row.tolist(), wanted, depth, strict=True):
            node, found = token // 24, 0
            while parent[node] != node:
                node, found = parent[node], found + 1
            assert found == steps
            assert target == (25 * node if steps else NOT_SCORED)
    assert depths.max() == task.bounds[level]


def value_of(text: str) -> int:
    """A recursive evaluation of one bracket."""

    def read(place: int) -> tuple[int, int]:
        if text[place] != "(":
            return int(text[place]), place + 1
        operation, values, place = text[place + 1], [], place + 2
        while text[place] != ")":
            value, place = read(place)
            values.append(value)
        return {"+": sum(values) % 10, "^": max(values), "_": min(values)}[operation], place + 1

    return read(0)[0]


@pytest.mark.parametrize("level", range(5))
def test_a_closing_bracket_is_labelled_with_its_value_and_height(level: int) -> None:
    tokens, targets, heights = Expressions().generate(level, 8, np.random.default_rng(level))
    for row, wanted, height in zip(tokens, targets, heights, strict=True):
        text = bytes(row.astype(np.uint8)).decode()
        opened: list[int] = []
        deep: list[int] = []
        for place, byte in enumerate(text):
            if byte == "(":
                opened.append(place)
                deep.append(0)
            elif byte == ")":
                own = deep.pop() + 1
                if deep:
                    deep[-1] = max(deep[-1], own)
                assert height[place] == own
                assert wanted[place] == ord(str(value_of(text[opened.pop() : place + 1])))
            else:
                assert wanted[place] == NOT_SCORED
        assert not opened
    assert heights.max() == level + 1


@pytest.mark.parametrize("name", ENCODER_TASKS)
def test_documents_are_the_same_every_time_and_levels_are_named(name: str) -> None:
    task = ENCODER_TASKS[name]()
    first, again = task.sequences(3), task.sequences(3)
    assert [s.tokens.tolist() for s in first] == [s.tokens.tolist() for s in again]
    assert len({s.uid for s in first}) == len(first) == 4
    names = task.subset_names["level"]
    for sequence in first:
        codes = sequence.codes["level"]
        assert ((codes >= 0) == (sequence.targets != NOT_SCORED)).all()
        assert codes.max() < len(names)
