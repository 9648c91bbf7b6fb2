"""The labels of the procedural tasks, against solvers that follow the text of a sequence one symbol at a time."""

import json
from itertools import permutations

import numpy as np
import pytest

from halting_bench.benchmarks.base import NOT_SCORED
from halting_bench.benchmarks.procedural import TASKS, Add, Hop


def solve_shell(text: str) -> tuple[dict[int, str], dict[int, int]]:
    """Moves the cups themselves: a list of five, one of which holds the ball."""
    cups = [index == int(text[1]) for index in range(5)]
    pairs = [(first, second) for first in range(5) for second in range(first + 1, 5)]
    labels, difficulty = {}, {}
    for position, letter in enumerate(text[2:], 2):
        first, second = pairs[ord(letter) - ord("a")]
        cups[first], cups[second] = cups[second], cups[first]
        labels[position], difficulty[position] = str(cups.index(True)), position - 1
    return labels, difficulty


def solve_pancake(text: str) -> tuple[dict[int, str], dict[int, int]]:
    """Turns over the stack itself: a list of six, one of which is marked."""
    stack = [index == int(text[1]) for index in range(6)]
    labels, difficulty = {}, {}
    for position, digit in enumerate(text[2:], 2):
        stack[: int(digit)] = reversed(stack[: int(digit)])
        labels[position], difficulty[position] = str(stack.index(True)), position - 1
    return labels, difficulty


def solve_s3(text: str) -> tuple[dict[int, str], dict[int, int]]:
    """Sends three points through the permutations one after another."""
    elements = list(permutations(range(3)))
    points = [0, 1, 2]
    labels, difficulty = {}, {}
    for position, letter in enumerate(text[1:], 1):
        element = elements[ord(letter) - ord("a")]
        points = [element[point] for point in points]
        labels[position], difficulty[position] = chr(ord("a") + elements.index(tuple(points))), position
    return labels, difficulty


def solve_hop(text: str) -> tuple[dict[int, str], dict[int, int]]:
    """Follows each definition back to its digit."""
    source = {text[position]: text[position + 1] for position in range(1, len(text), 2)}
    assert len(source) == (len(text) - 1) // 2, "a variable is defined twice"
    labels, difficulty = {}, {}
    for position in range(2, len(text), 2):
        symbol, hops = text[position], 1
        while not symbol.isdigit():
            symbol, hops = source[symbol], hops + 1
        labels[position], difficulty[position] = symbol, hops
    return labels, difficulty


def solve_add(text: str) -> tuple[dict[int, str], dict[int, int]]:
    """Adds the two whole numbers; the chain is the least number of earlier pairs that decide the carry."""
    pairs = [(int(text[position]), int(text[position + 1])) for position in range(1, len(text), 2)]
    total = sum((first + second) * 10**place for place, (first, second) in enumerate(pairs))
    labels, difficulty = {}, {}
    for place in range(len(pairs)):
        labels[2 + 2 * place] = str(total // 10**place % 10)
        chain = 1
        while chain <= place and sum(pairs[place - chain]) == 9:
            chain += 1
        difficulty[2 + 2 * place] = chain
    return labels, difficulty


SOLVERS = {"shell": solve_shell, "pancake": solve_pancake, "s3": solve_s3, "hop": solve_hop, "add": solve_add}
every_task = pytest.mark.parametrize("name", list(TASKS))


@every_task
def test_labels_and_levels_equal_those_of_a_slow_solver(name: str) -> None:
    task = TASKS[name]()
    for level in range(len(task.bounds)):
        tokens, targets, levels = task.batch(level, 20, np.random.default_rng(level))
        assert tokens.shape == targets.shape == levels.shape == (20, task.length(level))
        for row in range(20):
            text = bytes(tokens[row].astype(np.uint8)).decode("ascii")
            labels, difficulty = SOLVERS[name](text)
            asked = {int(position): chr(targets[row, position]) for position in np.flatnonzero(targets[row] != NOT_SCORED)}
            assert asked == labels, text
            expected = {
                position: next(i for i, bound in enumerate(task.bounds) if hard <= bound)
                for position, hard in difficulty.items()
            }
            assert {int(position): int(levels[row, position]) for position in np.flatnonzero(levels[row] >= 0)} == expected, (
                text
            )


@every_task
def test_a_level_has_positions_of_its_own_and_none_above(name: str) -> None:
    task = TASKS[name]()
    for level in range(len(task.bounds)):
        _, _, levels = task.batch(level, 50, np.random.default_rng(0))
        assert levels.max() == level
        assert (levels == level).mean() > 0.02


@every_task
def test_names_say_which_levels_are_trained(name: str) -> None:
    task = TASKS[name]()
    names = task.subset_names["level"]
    assert len(names) == len(task.bounds) and task.trained >= 6
    assert [label.endswith("*") for label in names] == [False] * task.trained + [True] * (len(names) - task.trained)
    assert any(label.endswith("*") for label in names)


@every_task
def test_documents_are_pure_functions_of_their_id_and_seed(name: str) -> None:
    task, again, other = TASKS[name](), TASKS[name](), TASKS[name](seed=1)
    for mine, same, different in zip(task.sequences(7), again.sequences(7), other.sequences(7), strict=True):
        assert (mine.tokens == same.tokens).all() and (mine.targets == same.targets).all() and mine.uid == same.uid
        assert not np.array_equal(mine.tokens, different.tokens)
        assert chr(mine.tokens[0]) == task.tag and mine.codes["level"].dtype == np.int16
    assert not np.array_equal(task.sequences(7)[0].tokens, task.sequences(8)[0].tokens)


@every_task
def test_a_sample_is_a_prefix_of_one_seeded_order_of_all_documents(name: str) -> None:
    task = TASKS[name]()
    everything = task.sample(None, 3)
    assert sorted(everything) == list(range(2000))
    assert task.sample(50, 3) == everything[:50]
    assert task.sample(50, 4) != everything[:50]


@every_task
def test_the_manifest_is_json_and_changes_with_the_seed(name: str) -> None:
    assert json.dumps(TASKS[name]().manifest()) != json.dumps(TASKS[name](seed=1).manifest())
    assert TASKS[name]().manifest()["generator_version"] == 1


@every_task
def test_uids_are_unique_across_documents(name: str) -> None:
    uids = [sequence.uid for document in range(20) for sequence in TASKS[name]().sequences(document)]
    assert len(set(uids)) == len(uids) == 80


@pytest.mark.parametrize("name", ["shell", "pancake", "s3"])
def test_always_answering_the_commonest_label_scores_chance(name: str) -> None:
    task = TASKS[name]()
    _, targets, levels = task.batch(task.trained - 1, 4000, np.random.default_rng(0))
    hardest = targets[levels == task.trained - 1]
    assert np.bincount(hardest).max() / hardest.size == pytest.approx(task.chance, abs=0.01)


def test_hop_cannot_be_guessed_better_than_one_in_five_from_the_digits_seen() -> None:
    task = Hop()
    tokens, targets, levels = task.batch(task.trained - 1, 500, np.random.default_rng(0))
    for row in range(20):
        digits = [chr(token) for token in tokens[row] if chr(token).isdigit()]
        assert len(digits) == len(set(digits)) == 5
    shares = [np.unique(targets[row][levels[row] == task.trained - 1], return_counts=True)[1] for row in range(500)]
    assert all((counts == counts[0]).all() and len(counts) == 5 for counts in shares)


def test_guessing_the_carry_of_add_is_right_half_the_time() -> None:
    task = Add()
    tokens, targets, levels = task.batch(5, 4000, np.random.default_rng(0))
    answers = targets[:, 2::2] - ord("0")
    digits = (tokens[:, 1::2] + tokens[:, 2::2] - 2 * ord("0")) % 10
    no_carry = (answers == digits)[levels[:, 2::2] == 5]
    assert no_carry.mean() == pytest.approx(0.5, abs=0.05)
