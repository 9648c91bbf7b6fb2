"""Finding lm-eval's tasks: its environment, its index of names, and the YAML files behind them.

Importing this module imports neither lm-eval nor datasets.
"""

import contextlib
import io
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.benchmarks.lm_eval_errors import one_line
from halting_bench.errors import UserError

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

BUILT_IN_TASKS = Path(__file__).parent / "lm_eval_tasks"
"""The procedural tasks as lm-eval tasks: `lm_eval --include_path` takes this folder too."""

OFFLINE = "HALTING_BENCH_OFFLINE"
FEWSHOT_SEED = 1234  # lm-eval's own default


def prepare(*, offline: bool = False) -> None:
    """Sets what lm-eval and its libraries read from the environment when they are imported. Call it before any of them is.

    Args:
        offline: make no request to the hub. The environment variable HALTING_BENCH_OFFLINE=1 says the same.

    Raises:
        UserError: offline is asked for too late.
    """
    os.environ |= {"DISABLE_MULTIPROC": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")  # what keeps a task from loading is told once, as an error
    if not offline and os.environ.get(OFFLINE, "0") in ("", "0"):
        return
    if "huggingface_hub" in sys.modules and os.environ.get("HF_HUB_OFFLINE") != "1":
        raise UserError(f"the hub's library was imported before offline was asked for: set {OFFLINE}=1 in the environment")
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings about lm-eval's own usage, no progress bars of its libraries; global random generators are put back."""
    loggers = {logging.getLogger("lm_eval"): logging.ERROR, logging.getLogger("datasets"): logging.CRITICAL}
    before, states = {logger: logger.level for logger in loggers}, (random.getstate(), np.random.get_state())
    for logger, level in loggers.items():
        logger.setLevel(level)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            random.seed(0)
            np.random.seed(FEWSHOT_SEED)
            yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])


def task_manager(names: Sequence[str], include_path: Path | None) -> "TaskManager":
    """An index that knows these names. lm-eval's own 14,000 tasks are indexed (seconds) only when one of them is asked for."""
    prepare()
    from lm_eval.tasks import TaskManager

    folders = [BUILT_IN_TASKS] if include_path is None else [BUILT_IN_TASKS, include_path]
    if include_path is not None:
        check_folder(include_path)
    with quiet():
        small = TaskManager(include_path=list(folders), include_defaults=False)
        if names and all(is_file(name) or name in small.task_index for name in names):
            return small
        return TaskManager(include_path=list(folders))


def is_file(name: str) -> bool:
    """Whether a task is given by its YAML file."""
    return name.endswith((".yaml", ".yml"))


def check_folder(folder: Path) -> None:
    """lm-eval skips YAML files that it cannot read; here the first one is an error that names it."""
    if not folder.is_dir():
        raise UserError(f"include path '{folder}' is not a folder: give one that holds task YAML files")
    for file in sorted(folder.rglob("*.yaml")):
        check_yaml(file)


def check_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a task's YAML file, its includes merged, its functions unresolved. Raises UserError."""
    prepare()
    from lm_eval.tasks._yaml_loader import load_yaml

    if not file.is_file():
        raise UserError(f"no such task file: {file}")
    try:
        return load_yaml(file, resolve_func=False)
    except Exception as error:  # YAML errors, missing includes and wrong shapes alike
        raise UserError(f"{file} is not a task file: {one_line(error)}: mend it or move it out of the folder") from None


def described(manager: "TaskManager", name: str) -> str:
    """A task as errors name it: with its file, unless that is one of lm-eval's own, and the data files that it names."""
    import lm_eval.tasks

    entry = None if is_file(name) else manager.task_index.get(name)
    path, shown = (Path(name), Path(name).stem) if is_file(name) else (entry and entry.yaml_path, name)
    if not path or path.is_relative_to(Path(lm_eval.tasks.__file__).parent):
        return f"task '{shown}'"
    data = (check_yaml(path).get("dataset_kwargs") or {}).get("data_files") or {}
    files = data.values() if isinstance(data, dict) else [data]
    told = [str(path), *(f"data {file}" for file in files)]
    return f"task '{shown}' ({', '.join(dict.fromkeys(told))})"
