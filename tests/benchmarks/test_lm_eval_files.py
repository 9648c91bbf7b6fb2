"""Task files: listed, checked and localized; what is wrong with one is said in a line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from halting_bench.benchmarks.lm_eval_bridge import Suite
from halting_bench.benchmarks.lm_eval_errors import one_line
from halting_bench.benchmarks.lm_eval_files import localize, validate_tasks
from halting_bench.benchmarks.procedural import TASKS
from halting_bench.errors import UserError
from tests.benchmarks.lm_eval_fixtures import write_tasks


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_the_procedural_tasks_are_lm_eval_tasks() -> None:
    suite = Suite(["halting_procedural"], limit=8)
    assert set(suite.tasks) == {f"halting_{name}" for name in TASKS}
    for ask in suite.asks:
        tag = TASKS[ask.task.removeprefix("halting_")].tag
        assert ask.body.context.startswith(tag)  # type: ignore[union-attr]
        assert len(ask.body.continuation) == 1  # type: ignore[union-attr]
    results = suite.score({i: [(-1.0, i % 2 == 0)] for i in range(len(suite.asks))})
    assert results["results"]["halting_procedural"]["acc,none"] == 0.5


def test_validate_shows_what_a_task_asks(tmp_path: Path) -> None:
    rows = validate_tasks(["choice", "made"], write_tasks(tmp_path))
    assert [row["kind"] for row in rows] == ["loglikelihood", "generate_until"]
    assert rows[0]["documents"] == 4
    assert rows[0]["metrics"] == "acc, acc_norm, acc_mutual_info"
    assert rows[0]["prompt"].endswith("number 0 is ")


def test_a_localized_task_reads_local_files(tmp_path: Path) -> None:
    hub = {"task": "far", "dataset_path": "nobody/nothing", "test_split": "test", "training_split": "train"}
    hub |= {"output_type": "loglikelihood", "doc_to_text": "q", "doc_to_target": "a"}
    hub |= {"fewshot_split": "train", "num_fewshot": 2}
    source = tmp_path / "far.yaml"
    source.write_text(yaml.safe_dump(hub))
    data = tmp_path / "data"
    data.mkdir()
    (data / "far_test.jsonl").write_text(json.dumps({"q": "one", "a": " two"}) + "\n")
    path = localize(str(source), data, tmp_path / "out")
    suite = Suite(["far"], include_path=tmp_path / "out")
    assert path.name == "far.yaml"
    assert [(ask.body.context, ask.body.continuation) for ask in suite.asks] == [("one", " two")]  # type: ignore[union-attr]


def test_data_that_do_not_fit_leave_no_file_behind(tmp_path: Path) -> None:
    source = write_tasks(tmp_path) / "word.yaml"
    data = tmp_path / "data"
    data.mkdir()
    with pytest.raises(UserError, match=r"has no data for split 'test' of 'word': put it there as test\.jsonl"):
        localize(str(source), data, tmp_path / "out")
    (data / "test.jsonl").write_text(json.dumps({"other": "one"}) + "\n")
    with pytest.raises(UserError, match="does not fit task 'word'"):
        localize(str(source), data, tmp_path / "out")
    assert not (tmp_path / "out" / "word.yaml").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [", r"bad\.yaml is not a task file"),
        ("- a\n- b\n", r"bad\.yaml is not a task file.*list"),
        ("include: nothing.yaml\ntask: bad\n", r"bad\.yaml is not a task file.*nothing\.yaml"),
    ],
)
def test_a_broken_file_is_named_and_not_skipped(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "bad.yaml", text)
    with pytest.raises(UserError, match=message):
        Suite(["halting_shell"], include_path=tmp_path)
    with pytest.raises(UserError, match=message):
        Suite([str(tmp_path / "bad.yaml")])


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    task = {"task": "lost", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "/no/such/rows.jsonl"}}}
    task |= {"test_split": "test", "output_type": "loglikelihood", "doc_to_text": "q", "doc_to_target": "a"}
    write(tmp_path, "lost.yaml", yaml.safe_dump(task))
    with pytest.raises(UserError, match=r"task 'lost' \(.*lost\.yaml.*/no/such/rows\.jsonl.*data_files"):
        Suite(["lost"], include_path=tmp_path)


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({}, "", r"task 'odd' \(.*odd\.yaml, data .*rows\.jsonl\): its data has no rows: put"),
        ({}, '{"q": 1\n', r"odd\.yaml.*its data cannot be read \(.*JSON parse error.*\): mend the file"),
        ({"test_split": "validation"}, '{"q": "a"}\n', r"odd\.yaml.*its data has no 'validation': name a split"),
        ({"doc_to_text": "{{question}}"}, '{"q": "a"}\n', r"odd\.yaml.*'question' is undefined: name a column"),
        ({"metric_list": []}, '{"q": "a"}\n', r"odd\.yaml.* has no metric: give its metric_list one"),
        ({"metric_list": [{"metric": "acc", "aggregation": "sum"}]}, '{"q": "a"}\n', r"odd\.yaml.*unknown aggregation.*'acc'"),
        ({"output_type": "guess"}, '{"q": "a"}\n', r"odd\.yaml.*invalid output_type 'guess'"),
    ],
)
def test_what_is_wrong_with_a_task_is_told_before_any_model_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], rows: str, message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(rows)
    acc = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    task = {"task": "odd", "dataset_path": "json", "test_split": "test", "output_type": "loglikelihood", "metric_list": acc}
    task |= {"doc_to_text": "{{q}}", "doc_to_target": " b"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    write(tmp_path, "odd.yaml", yaml.safe_dump(task | changes))
    capfd.readouterr()
    with pytest.raises(UserError, match=message) as caught:
        Suite(["halting_shell", "odd"], include_path=tmp_path, limit=1)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_nothing_to_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="limit 0 of tasks choice gives no documents"):
        Suite(["choice"], include_path=write_tasks(tmp_path), limit=0)
    with pytest.raises(UserError, match="no tasks"):
        Suite([])
    with pytest.raises(UserError, match="no such task file"):
        Suite([str(tmp_path / "none.yaml")])


def test_an_answer_that_is_no_number_never_becomes_a_score(tmp_path: Path) -> None:
    suite = Suite(["choice_b"], include_path=write_tasks(tmp_path), limit=1)
    with pytest.raises(UserError, match="task 'choice_b', document 0: its answer is not a number"):
        suite.score({0: [(-1.0, True)], 1: [(float("nan"), False)], 2: [(-2.0, False)]})


def test_what_the_hub_says_becomes_one_line_with_the_remedy() -> None:
    gated = type("DatasetNotFoundError", (Exception,), {})("Dataset 'a/b' is a gated dataset on the Hub.")
    assert "accept the data set's terms" in one_line(gated)
    assert "tasks localize" in one_line(gated)
    unreachable = type("ConnectionError", (Exception,), {})("Couldn't reach 'a/b' on the Hub")
    assert "check the network" in one_line(unreachable)
    absent = type("DatasetNotFoundError", (Exception,), {})("Dataset 'a/b' doesn't exist")
    assert "check dataset_path" in one_line(absent)
    assert "\n" not in one_line(ValueError("first\nsecond"))


CUT_OFF = """
import socket, sys
calls = []
def refuse(*arguments, **named):
    calls.append(arguments)
    raise OSError("the network is cut off")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from halting_bench.benchmarks.lm_eval_bridge import Suite
from halting_bench.benchmarks.lm_eval_index import prepare
from halting_bench.errors import UserError
from pathlib import Path
prepare(offline=True)
assert len(Suite(["choice"], include_path=Path(sys.argv[1]), limit=2).asks) == 12
try:
    Suite([sys.argv[1] + "/far.yaml"])
except UserError as error:
    print(error)
assert not calls, calls
"""


def test_offline_makes_no_request_at_all(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    write(tmp_path, "far.yaml", "task: far\ndataset_path: nobody/nothing\noutput_type: loglikelihood\ntest_split: test\n")
    done = subprocess.run([sys.executable, "-c", CUT_OFF, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "task" in done.stdout
    assert "tasks localize" in done.stdout


def test_naming_the_bridge_imports_neither_lm_eval_nor_datasets() -> None:
    program = (
        "import sys, halting_bench.cli.tasks, halting_bench.cli.eval, halting_bench.evaluate, halting_bench.task_sweep\n"
        "print({'lm_eval', 'datasets', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
