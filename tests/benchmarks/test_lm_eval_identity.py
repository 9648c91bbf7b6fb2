"""The law of the bridge: K points scored from one pass are what K separate lm-eval runs say."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from halting_bench.answering import answer
from halting_bench.architectures.toy import toy_model
from halting_bench.benchmarks.asks import Answer, Ask, Generation
from halting_bench.benchmarks.lm_eval_bridge import Suite, answering_model
from halting_bench.benchmarks.lm_eval_index import task_manager
from halting_bench.catalog import find_policy
from halting_bench.plan import build_policy, plan_policy
from tests.benchmarks.lm_eval_fixtures import BYTES, executed_point, replayed, write_tasks

STEPS = 5
NAMES = ["choice", "both", "rolling", "made"]

Answers = Callable[[list[Ask]], dict[int, list[Answer]]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def separate_run(folder: Path, names: list[str], answers: Answers, limit: int) -> dict[str, Any]:
    """lm-eval's own simple_evaluate, with a model that answers each kind of question when it is asked."""
    import lm_eval

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results: dict[str, Any] = lm_eval.simple_evaluate(
            answering_model(lambda asks: list(answers(asks).values())),
            tasks=names,
            limit=limit,
            bootstrap_iters=0,
            task_manager=task_manager(names, folder),
        )
    return results


def by_replay_or_execution(threshold: float) -> Answers:
    """Kl at a threshold: replayed where text is scored, executed where it is made; a kind at a time, as lm-eval asks.

    Other batches would round differently, and the law is one of equal bits.
    """
    model = toy_model()
    recipe = find_policy("kl")
    plan = plan_policy(recipe, model.spec, STEPS)

    def answers(asks: list[Ask]) -> dict[int, list[Answer]]:
        found: dict[int, list[Answer]] = {}
        for kind in {ask.kind for ask in asks}:
            mine = [i for i, ask in enumerate(asks) if ask.kind == kind]
            some = [asks[i] for i in mine]
            if isinstance(some[0].body, Generation):
                answered = answer(model, BYTES, some, executed_point(build_policy(recipe, threshold), STEPS)).answers
            else:
                answered = replayed(model, plan, threshold, some, STEPS)
            found |= {mine[i]: value for i, value in answered.items()}
        return dict(sorted(found.items()))

    return answers


def test_points_scored_from_one_suite_equal_separate_lm_eval_runs(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.evaluator

    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # runs pip, for seconds
    suite = Suite(NAMES, include_path=tasks, limit=3)
    kinds = {ask.kind for ask in suite.asks}
    assert kinds == {"loglikelihood", "loglikelihood_rolling", "generate_until"}
    differ = set()
    for threshold in (0.05, 0.4, 0.05):  # the first again: scoring leaves no trace
        ours = suite.score(by_replay_or_execution(threshold)(suite.asks))
        theirs = separate_run(tasks, NAMES, by_replay_or_execution(threshold), limit=3)
        assert set(ours) <= set(theirs)
        for key in ours:
            assert ours[key] == theirs[key], key
        differ.add(repr(ours["results"]))
    assert len(differ) == 2


def test_samples_read_quickly_are_those_of_the_results(tasks: Path) -> None:
    suite = Suite(NAMES, include_path=tasks, limit=3)
    answers = by_replay_or_execution(0.4)(suite.asks)
    slow, quick = suite.score(answers)["samples"], suite.samples(answers)["samples"]
    assert list(slow) == list(quick)
    for task, records in slow.items():
        for full, short in zip(records, quick[task], strict=True):
            assert short == {name: full[name] for name in ("filter", "doc_id", *full["metrics"])}


def test_a_text_made_at_two_points_is_judged_once(tasks: Path, tmp_path: Path) -> None:
    made = yaml.safe_load((tasks / "made.yaml").read_text())
    (tmp_path / "judge.py").write_text(
        "from pathlib import Path\n"
        "def judge(document, texts):\n"
        f"    with Path({str(tmp_path / 'log')!r}).open('a') as log:\n"
        "        log.write(document['q'] + texts[0] + chr(10))\n"
        "    return {'exact_match': float(len(texts[0]))}\n"
    )
    made |= {"task": "judged", "repeats": 1}
    del made["filter_list"]
    text = yaml.safe_dump(made) + "process_results: !function judge.judge\n"
    (tmp_path / "judged.yaml").write_text(text)
    suite = Suite(["judged"], include_path=tmp_path, limit=2)
    for second, calls in (("two", 2), ("two", 2), ("three", 3)):
        scores = suite.score({0: ["one"], 1: [second]})["results"]["judged"]
        assert scores["exact_match,none"] == (3 + len(second)) / 2
        assert len((tmp_path / "log").read_text().splitlines()) == calls


def test_repeats_get_answers_of_their_own(tasks: Path) -> None:
    suite = Suite(["made"], include_path=tasks, limit=2)
    model = toy_model()
    found = answer(model, BYTES, suite.asks, executed_point(build_policy(find_policy("kl"), 0.05), STEPS)).answers
    results = suite.score(found)
    sample = results["samples"]["made"][0]
    assert sample["resps"] == [found[0]]
    assert len(set(found[0])) == 2
