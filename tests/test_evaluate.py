"""One operating point run the lm-eval way, and the files it writes."""

import json
import os
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from halting_bench.architectures.toy import write_toy
from halting_bench.errors import UserError
from halting_bench.evaluate import EvalRequest, evaluate, results_table, write_results
from tests.benchmarks.lm_eval_fixtures import write_tasks

KINDS = {"choice": "loglikelihood", "rolling": "loglikelihood_rolling", "made": "generate_until"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    write_toy(folder / "toy")
    return write_tasks(folder)


def request(place: Path, policy: str, threshold: float, tasks: tuple[str, ...] = tuple(KINDS), **more: object) -> EvalRequest:
    given = {"limit": 2, "max_steps": 5, "max_length": 48, "include_path": place, **more}
    return EvalRequest(str(place / "toy"), policy, threshold, tasks, **given)  # type: ignore[arg-type]


def test_the_policy_acts_on_every_kind_of_question(place: Path) -> None:
    results = evaluate(request(place, "fixed", 3))
    for task, kind in KINDS.items():
        figures = results["halting_bench"]["tasks"][task][kind]
        assert figures["mean_depth"] == 3
        assert set(figures["depth_histogram"]) == {"3"}
    adaptive = evaluate(request(place, "kl", 0.3))
    for task, kind in KINDS.items():
        figures = adaptive["halting_bench"]["tasks"][task][kind]
        assert sum(figures["depth_histogram"].values()) == figures["tokens"] > 0
        assert 2 <= figures["mean_depth"] < 5
        assert figures["halted"] + figures["exhausted"] == figures["tokens"]
    assert adaptive["halting_bench"]["tasks"]["rolling"]["loglikelihood_rolling"]["truncated_questions"] == 0


def test_its_files_are_read_by_lm_eval_s_own_tools(place: Path, tmp_path: Path) -> None:
    from lm_eval.utils import get_file_task_name, get_results_filenames, get_sample_results_filenames, make_table

    results = evaluate(request(place, "latent-diff", 0.3, ("choice", "made")))
    path = write_results(results, tmp_path, datetime(2030, 1, 2, 3, 4, 5, 6))
    assert path == tmp_path / "toy" / "results_2030-01-02T03-04-05.000006.json"
    names = [str(file) for file in sorted(path.parent.iterdir())]
    assert get_results_filenames(names) == [str(path)]
    samples = get_sample_results_filenames(names)
    assert [get_file_task_name(Path(name).name) for name in samples] == ["choice", "made"]
    written = json.loads(path.read_text())
    assert "acc_norm" in make_table(written)
    assert written["results"]["choice"] == results["results"]["choice"]
    records = [json.loads(line) for line in Path(samples[0]).read_text().splitlines()]
    assert [record["doc_id"] for record in records] == [0, 1]
    mean = sum(record["acc"] for record in records) / 2
    assert mean == written["results"]["choice"]["acc,none"]
    assert "mean depth" in results_table(results)


def test_a_point_that_cannot_be_is_refused(place: Path) -> None:
    with pytest.raises(UserError, match=r"threshold 2\.5 of policy 'fixed' is a depth"):
        evaluate(request(place, "fixed", 2.5))
    with pytest.raises(UserError, match="does not apply to this model: the model has no halting gate"):
        evaluate(request(place, "gate-cdf", 0.5))
    with pytest.raises(UserError, match="max_length 9999 must lie in"):
        evaluate(request(place, "fixed", 2, max_length=9999))


REAL = os.environ.get("HALTING_BENCH_DATA", "")
COLUMNS = {
    "arc_easy": {"output_type": "multiple_choice", "doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "gold"},
    "lambada_openai": {"output_type": "loglikelihood", "doc_to_text": "context", "doc_to_target": " {{continuation}}"},
    "gsm8k_test": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_target": "{{answer.split('#### ')[1]}}",
        "generation_kwargs": {"until": ["Question:"], "max_gen_toks": 4},
    },
}
METRICS = {"generate_until": "exact_match"}


@pytest.mark.skipif(not REAL, reason="HALTING_BENCH_DATA does not point to a folder of benchmark data")
def test_real_benchmarks_run_from_local_files(place: Path, tmp_path: Path) -> None:
    for name, columns in COLUMNS.items():
        task = {"task": name, "dataset_path": "json", "test_split": "test", **columns}
        task["dataset_kwargs"] = {"data_files": {"test": str(Path(REAL) / f"{name}.jsonl")}}
        metric = METRICS.get(str(columns["output_type"]), "acc")
        task["metric_list"] = [{"metric": metric, "aggregation": "mean", "higher_is_better": True}]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    results = evaluate(request(place, "latent-diff", 0.3, tuple(COLUMNS), include_path=tmp_path, max_length=128))
    assert results["n-samples"]["gsm8k_test"] == {"original": 1319, "effective": 2}
    assert results["halting_bench"]["tasks"]["gsm8k_test"]["generate_until"]["tokens"] == 8
    assert results["halting_bench"]["tasks"]["lambada_openai"]["loglikelihood"]["truncated_questions"] == 2
