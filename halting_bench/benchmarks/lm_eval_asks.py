"""lm-eval's requests as questions. Imports no lm-eval: a request is known by its fields."""

from collections.abc import Sequence
from typing import Any, Protocol

from halting_bench.benchmarks.asks import Ask, Continuation, Generation, Whole
from halting_bench.errors import UserError

MAX_NEW_TOKENS = 256
"""lm-eval's own default."""

_TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one given counts
_GENERATION_KEYS = {"until", "do_sample", "temperature", "top_k", "top_p", *_TOKEN_LIMITS}


class Instance(Protocol):
    """A request of lm-eval."""

    request_type: Any
    idx: int
    task_name: str | None
    doc_id: int | None
    repeats: int | None

    @property
    def args(self) -> tuple: ...


Numbers = dict[tuple[str, int], int]


def document_numbers(instances: Sequence[Instance]) -> Numbers:
    """Numbers the (task, document) pairs in order of appearance."""
    numbers: Numbers = {}
    for instance in instances:
        numbers.setdefault((str(instance.task_name), int(instance.doc_id or 0)), len(numbers))
    return numbers


def to_ask(instance: Instance, numbers: Numbers) -> Ask:
    """One of lm-eval's requests as a question."""
    task, place = str(instance.task_name), int(instance.doc_id or 0)
    body: Continuation | Whole | Generation
    if len(instance.args) > 2:
        raise UserError(f"task '{task}' asks about images or sound: these models read text only")
    if instance.request_type == "loglikelihood":
        body = Continuation(*instance.args)
    elif instance.request_type == "loglikelihood_rolling":
        body = Whole(*instance.args)
    else:
        body = _generation(task, *instance.args)
    return Ask(task, numbers[task, place], place, instance.idx, instance.repeats or 1, body)


def _generation(task: str, context: str, kwargs: dict[str, Any]) -> Generation:
    """Generation arguments, with lm-eval's meaning: no sampling unless it is asked for."""
    unknown = {key for key, value in kwargs.items() if value is not None} - _GENERATION_KEYS
    if unknown:
        raise UserError(f"task '{task}' sets generation argument '{min(unknown)}', which is not known here: remove it")
    until = kwargs.get("until") or []
    limit = next((kwargs[key] for key in _TOKEN_LIMITS if kwargs.get(key) is not None), MAX_NEW_TOKENS)
    sampled = kwargs.get("do_sample") is not False
    return Generation(
        context=context,
        until=tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop),
        max_new_tokens=int(limit),
        temperature=float(kwargs.get("temperature") or 0.0) if sampled else 0.0,
        top_k=kwargs.get("top_k") if sampled else None,
        top_p=kwargs.get("top_p") if sampled else None,
    )
