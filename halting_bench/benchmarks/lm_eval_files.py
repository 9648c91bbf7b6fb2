"""Finding, checking and localizing lm-eval task files."""

import fnmatch
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from halting_bench.benchmarks.asks import Continuation, Generation
from halting_bench.benchmarks.lm_eval_bridge import Suite
from halting_bench.benchmarks.lm_eval_errors import unknown_task
from halting_bench.benchmarks.lm_eval_index import BUILT_IN_TASKS, check_yaml, is_file, prepare, task_manager
from halting_bench.errors import UserError

SPLITS = ("training_split", "validation_split", "test_split")
_SHOWN = 60  # characters of a prompt's end and of an answer
_PREVIEW = 2  # documents that `validate` builds of each task


def list_tasks(pattern: str = "*", include_path: Path | None = None) -> list[dict[str, Any]]:
    """Tasks, groups and tags whose name fits a shell pattern, as rows of name, kind and file.

    Raises:
        UserError: none does.
    """
    manager = task_manager([], include_path)
    names = fnmatch.filter(manager.all_tasks, pattern)
    if not names:
        raise unknown_task(pattern, manager.all_tasks)
    rows = []
    for name in names:
        entry = manager.task_index[name]
        kind = entry.kind.name.lower().removeprefix("py_")
        rows.append({"name": name, "kind": kind, "file": str(entry.yaml_path) if entry.yaml_path else ""})
    return rows


@dataclass(frozen=True)
class Checked:
    """What `validate` found of one task."""

    task: str
    version: str
    kind: str  # of its questions
    documents: int
    num_fewshot: int
    metrics: str
    prompt: str  # the first one's end
    answer: str  # its start; empty where it is to be made


def validate_tasks(names: Sequence[str], include_path: Path | None = None, *, offline: bool = False) -> list[dict[str, Any]]:
    """Loads tasks and builds their first questions. Raises UserError for whatever keeps them from running."""
    prepare(offline=offline)
    suite = Suite(names, include_path=include_path, limit=_PREVIEW)
    rows = []
    for name, task in suite.tasks.items():
        body = next(ask for ask in suite.asks if ask.task == name).body
        prompt = body.context if isinstance(body, Continuation | Generation) else body.text
        answer = body.continuation if isinstance(body, Continuation) else ""
        found = Checked(
            task=name,
            version=str(task.VERSION),
            kind=next(ask.kind for ask in suite.asks if ask.task == name),
            documents=len(task.eval_docs),
            num_fewshot=int(task.config.num_fewshot or 0),
            metrics=", ".join(task.higher_is_better()),
            prompt=prompt[-_SHOWN:],
            answer=answer[:_SHOWN],
        )
        rows.append(asdict(found))
    return rows


def localize(task: str, data: Path, out: Path, include_path: Path | None = None) -> Path:
    """Writes a task file that reads a known task from local files instead of the hub, and checks that it loads.

    Each split that the task names is read from `SPLIT.jsonl`, `TASK_SPLIT.jsonl` (or .json) in the data folder; the split
    that is evaluated may also be the only file there, or be called `TASK.jsonl`. Other splits that are not there are
    dropped. The files must have the columns of the hub's data set.

    Args:
        task: its name, or its YAML file.
        data: a folder with the files, or one file.
        out: the folder to write to; give it as --include-path later.
        include_path: where the task is found, if it is not lm-eval's own.

    Returns:
        The file written: a task of the same name.

    Raises:
        UserError: no such task or data, or it does not load.
    """
    source = _task_file(task, include_path)
    config = check_yaml(source)
    name = str(config.get("task"))
    splits = {key: str(config[key]) for key in SPLITS if config.get(key)}
    if not splits or not isinstance(config.get("task"), str):
        raise UserError(f"'{task}' is no single task with splits of its own: localize the tasks of a group one by one")
    evaluated = splits.get("test_split") or splits.get("validation_split")
    if not data.exists():
        raise UserError(f"no such data: {data} (give a folder with {evaluated}.jsonl, or the file)")
    files = {split: file for split in set(splits.values()) if (file := _data_file(data, name, split, split == evaluated))}
    if evaluated not in files:
        raise UserError(f"{data} has no data for split '{evaluated}' of '{name}': put it there as {evaluated}.jsonl")
    wrapper: dict[str, Any] = {
        "include": os.fspath(source.resolve()),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: os.fspath(file.resolve()) for split, file in sorted(files.items())}},
    }
    wrapper |= {key: None for key, split in splits.items() if split not in files}
    if config.get("fewshot_split") and config["fewshot_split"] not in files:
        wrapper |= {"fewshot_split": None, "num_fewshot": 0}
    path = out / f"{name}.yaml"
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(wrapper, sort_keys=False, allow_unicode=True), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another --out") from None
    try:
        validate_tasks([os.fspath(path)])
    except UserError as error:
        path.unlink()
        raise UserError(f"{data} does not fit task '{name}': {error}") from error
    return path


def _task_file(task: str, include_path: Path | None) -> Path:
    if is_file(task):
        return Path(task)
    manager = task_manager([task], include_path)
    if task not in manager.task_index:
        raise unknown_task(task, manager.all_tasks)
    path = manager.task_index[task].yaml_path
    if path is None:
        raise UserError(f"'{task}' is a tag, not a task: localize its tasks one by one (halting-bench tasks list)")
    if path.is_relative_to(BUILT_IN_TASKS):
        raise UserError(f"task '{task}' is generated: it needs no data")
    return Path(path)


def _data_file(data: Path, name: str, split: str, evaluated: bool) -> Path | None:
    if data.is_file():
        return data if evaluated else None
    stems = [split, f"{name}_{split}", *([name] if evaluated else [])]
    for stem in stems:
        for suffix in (".jsonl", ".json"):
            if (data / f"{stem}{suffix}").is_file():
                return data / f"{stem}{suffix}"
    only = sorted(data.glob("*.jsonl"))
    return only[0] if evaluated and len(only) == 1 else None
