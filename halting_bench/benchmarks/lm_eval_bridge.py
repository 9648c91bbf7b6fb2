"""The only door to lm-eval: its tasks become questions, and answers become its scores.

Questions are built once; each set of answers is then scored by lm-eval itself, as if it had run the model, so K
operating points cost one model pass and K scorings. Importing this module imports neither lm-eval nor datasets.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halting_bench.benchmarks.asks import Answer, Ask, Generation
from halting_bench.benchmarks.lm_eval_asks import document_numbers, to_ask
from halting_bench.benchmarks.lm_eval_errors import one_line, unknown_task
from halting_bench.benchmarks.lm_eval_index import FEWSHOT_SEED, check_yaml, described, is_file, quiet, task_manager
from halting_bench.benchmarks.lm_eval_results import first_broken, metrics_of
from halting_bench.errors import UserError

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

GivesAnswers = Callable[[list[Ask]], list[list[Answer]]]
"""Questions -> for each, as many answers as it has repeats."""


def answering_model(answers: GivesAnswers, asks: Sequence[Ask] = (), instances: Sequence["Instance"] = ()) -> "LM":
    """A model for lm-eval's own evaluate functions.

    Args:
        answers: gives them, a kind of question at a time.
        asks: questions that are known already.
        instances: lm-eval's side of `asks`, in the same order.
    """
    from lm_eval.api.model import LM

    known = {id(i): ask for i, ask in zip(instances, asks, strict=True)}

    class AnsweringModel(LM):
        def _answer(self, requests: list["Instance"]) -> list[Any]:
            distinct = list({id(r): r for r in requests}.values())
            numbers = document_numbers(distinct)
            wanted = [known.get(id(r)) or to_ask(r, numbers) for r in distinct]
            queues = {id(r): iter(found) for r, found in zip(distinct, answers(wanted), strict=True)}
            return [next(queues[id(r)]) for r in requests]

        def loglikelihood(self, requests: list["Instance"]) -> list[tuple[float, bool]]:
            return self._answer(requests)

        def loglikelihood_rolling(self, requests: list["Instance"]) -> list[float]:
            return self._answer(requests)

        def generate_until(self, requests: list["Instance"]) -> list[str]:
            return self._answer(requests)

    return AnsweringModel()


class Suite:
    """Loaded tasks with their questions."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        include_path: Path | None = None,
        limit: int | None = None,
        num_fewshot: int | None = None,
        gen_kwargs: dict[str, Any] | None = None,
        confirm_run_unsafe_code: bool = False,
    ):
        """
        Args:
            names: tasks, groups, tags or YAML files.
            include_path: a folder with more task files.
            limit: the first so many documents of each task.
            num_fewshot: examples before each question, where the task does not forbid them.
            gen_kwargs: over the tasks' own generation arguments.
            confirm_run_unsafe_code: allow tasks that run the code that the model writes.

        Raises:
            UserError: a task is unknown, broken or empty, or its data cannot be had.
        """
        if not names:
            raise UserError("no tasks: type --tasks NAME[,NAME...] (see halting-bench tasks list)")
        if limit is not None and limit < 1:
            raise UserError(f"limit {limit} of tasks {', '.join(names)} gives no documents: type at least 1")
        for name in names:
            if is_file(name):
                check_yaml(Path(name))
        manager = task_manager(names, include_path)
        self.names, self.limit = tuple(names), limit
        self._unsafe = confirm_run_unsafe_code
        with quiet():
            self.loaded = _load(manager, list(names))
            self.tasks: dict[str, Any] = self.loaded["tasks"]
            for name, task in self.tasks.items():
                _configure(task, num_fewshot, gen_kwargs)
                _build(described(manager, name), task, limit)
                if task.get_config("output_type") == "generate_until":
                    _remember_texts(task)
        self.instances: list[Instance] = [i for task in self.tasks.values() for i in task.instances]
        numbers = document_numbers(self.instances)
        self.documents = list(numbers)  # number -> (task, place)
        self.asks = [to_ask(instance, numbers) for instance in self.instances]

    @property
    def generates(self) -> bool:
        """Whether any question is answered by generating: such tasks have no replayed points."""
        return any(isinstance(ask.body, Generation) for ask in self.asks)

    def score(self, answers: dict[int, list[Answer]]) -> dict[str, Any]:
        """What lm-eval says of these answers: its results dictionary, samples included.

        Args:
            answers: index of the question in `asks` -> one answer a repeat.

        Raises:
            UserError: an answer is not a number, or a metric is missing.
        """
        broken = first_broken(answers)
        if broken is not None:
            ask = self.asks[broken]
            raise UserError(
                f"task '{ask.task}', document {ask.place}: its answer is not a number: the states broke; try a smaller "
                "--max-steps, or --dtype float32 (halting-bench doctor says more)"
            )
        number = {id(ask): i for i, ask in enumerate(self.asks)}
        model = answering_model(lambda asks: [answers[number[id(ask)]] for ask in asks], self.asks, self.instances)
        results = self._evaluate(model)
        for name in self.tasks:
            if not metrics_of(results, name):
                known = ", ".join(self.tasks[name].aggregation())
                raise UserError(f"task '{name}' gave no value of any metric ({known}): name one that its output_type has")
        return results

    def _evaluate(self, model: "LM") -> dict[str, Any]:
        import lm_eval

        for instance in self.instances:
            instance.resps, instance.filtered_resps = [], {}
        for task in self.tasks.values():
            vars(task)["build_all_requests"] = lambda **arguments: None  # they are built
        try:
            with quiet():
                results: dict[str, Any] = lm_eval.evaluate(
                    model,
                    self.loaded,
                    limit=self.limit,
                    bootstrap_iters=0,  # it forks processes, and intervals are ours
                    log_samples=True,
                    confirm_run_unsafe_code=self._unsafe,
                )
            return results
        finally:
            for task in self.tasks.values():
                del vars(task)["build_all_requests"]

    def samples(self, answers: dict[int, list[Answer]]) -> dict[str, Any]:
        """Each document's metrics as in the samples of `score`, by the same code of the tasks' own, in a third of the time.

        For thousands of answers whose results files nobody reads.

        Returns:
            {"samples": {task: [{"filter", "doc_id", metric: value}]}}.
        """
        for number, instance in enumerate(self.instances):
            instance.resps, instance.filtered_resps = list(answers[number]), {}
        found: dict[str, list[dict[str, Any]]] = {}
        with quiet():
            for name, task in self.tasks.items():
                task.apply_filters()
                asked: dict[int, list[Instance]] = {}
                for instance in task.instances:
                    asked.setdefault(instance.doc_id, []).append(instance)
                for kept in task.instances[0].filtered_resps:
                    for place, instances in asked.items():
                        said = [i.filtered_resps[kept] for i in sorted(instances, key=lambda i: i.idx)]
                        metrics = task.process_results(instances[0].doc, said)
                        found.setdefault(name, []).append({"filter": kept, "doc_id": place, **metrics})
        return {"samples": found}

    def aggregate(self, task: str, metric: str, values: list[Any]) -> float:
        """A task's own aggregation of per-document values; NaN where it is undefined."""
        function = self.tasks[task].aggregation().get(metric) or np.mean
        try:
            return float(function(values))
        except (ValueError, ZeroDivisionError, OverflowError):
            return math.nan

    def is_mean(self, task: str, metric: str) -> bool:
        """Whether a metric is the mean over documents."""
        from lm_eval.api.metrics import mean

        return self.tasks[task].aggregation().get(metric, mean) is mean

    def higher_is_better(self, task: str, metric: str) -> bool:
        """The direction of a metric; higher when the task does not say."""
        return bool(self.tasks[task].higher_is_better().get(metric, True))


def _load(manager: "TaskManager", names: list[str]) -> Any:
    for name in names:
        if not is_file(name) and name not in manager.task_index:
            raise unknown_task(name, manager.all_tasks)
    try:
        return manager.load(names)
    except UserError:
        raise
    except Exception as error:  # data sets, templates and YAML raise whatever they like
        for name in names if len(names) > 1 else []:
            _load(manager, [name])  # the one that fails says so
        raise UserError(f"{described(manager, names[0])}: {one_line(error)}") from error


def _configure(task: Any, num_fewshot: int | None, gen_kwargs: dict[str, Any] | None) -> None:
    """The overrides of lm-eval's simple_evaluate, by its rules."""
    if gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config(key="generation_kwargs", value=gen_kwargs, update=True)
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)


def _remember_texts(task: Any) -> None:
    """A text that several operating points make is judged once: judging can be slow, and texts often agree."""
    judge = task.process_results
    known: dict[bytes, Any] = {}

    def judged(document: Any, texts: list[Any]) -> Any:
        key = hashlib.blake2b(repr((document, texts)).encode(), digest_size=16).digest()
        if key not in known:
            known[key] = judge(document, texts)
        return known[key]

    vars(task)["process_results"] = judged


def _build(told: str, task: Any, limit: int | None) -> None:
    """told: the task as errors name it."""
    try:
        task.build_all_requests(limit=limit, rank=0, world_size=1, cache_requests=False)
    except Exception as error:
        raise UserError(f"{told}: {one_line(error)}") from error
    counts = Counter(instance.request_type for instance in task.instances)
    if not counts:
        raise UserError(f"{told} has no documents: check its data and splits")
    if not task.aggregation():
        raise UserError(f"{told} has no metric: give its metric_list one, such as acc or exact_match")
    for metric, aggregation in task.aggregation().items():
        if aggregation is None:
            raise UserError(f"{told}: unknown aggregation of metric '{metric}': type aggregation: mean, or one of lm-eval's")
