"""One document of a text benchmark, token by token: how many loops each policy gave each token.

Only benchmarks of bytes: their tokens can be shown without a tokenizer.
"""

import codecs
from typing import TYPE_CHECKING

import numpy as np

from halting_bench.benchmarks.base import NOT_SCORED, Benchmark
from halting_bench.engine.points import TracedUnit
from halting_bench.engine.replay import exits_at, running_extremum, signed_threshold
from halting_bench.plan import PolicyPlan
from halting_bench.store import Arrays
from halting_bench.unit import Unit

if TYPE_CHECKING:
    import pandas as pd

LENGTH = 700
"""Tokens shown."""


def text_frame(benchmark: Benchmark, unit: Unit, traced: TracedUnit, rows: "pd.DataFrame") -> "pd.DataFrame":
    """Columns policy, place, token (text, empty inside a character of several bytes), exit_step: the first test document's
    first sequence, each policy at its point of equal quality. No rows for a benchmark that is not text.

    Args:
        benchmark: where the document comes from.
        unit: what was traced.
        traced: its recorded pass.
        rows: the unit's points, with roles marked.
    """
    import pandas as pd

    if benchmark.manifest().get("encoding") != "bytes":
        return pd.DataFrame()
    sequence = unit.draw(benchmark.sequences(unit.documents[unit.calibration()]))[0]
    scored = np.flatnonzero(sequence.targets != NOT_SCORED)[:LENGTH]
    tokens = _characters(sequence.targets[scored])
    number, shard, where = _find(traced, sequence.uid, scored)
    plans = {plan.recipe.name: plan for plan in unit.plans}
    iso = rows[(rows["role"] == "iso") & rows["policy"].isin(plans)].drop_duplicates("policy")
    parts = []
    for policy, threshold in zip(iso["policy"], iso["threshold"], strict=True):
        exits = np.minimum(_exits(plans[policy], threshold, number, shard, where), traced.steps)
        parts.append(pd.DataFrame({"policy": policy, "place": np.arange(len(tokens)), "token": tokens, "exit_step": exits}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _characters(targets: np.ndarray) -> list[str]:
    """Each byte's text; a character of several bytes stands at its last one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(bytes([int(byte)])) for byte in targets]


def _find(traced: TracedUnit, uid: int, scored: np.ndarray) -> tuple[int, Arrays, np.ndarray]:
    """The shard that holds a sequence, and its rows at the scored positions."""
    for number, shard in enumerate(traced.shards):
        rows = np.flatnonzero(shard["sequence"] == uid)
        if len(rows):
            order = rows[np.argsort(shard["position"][rows])]
            return number, shard, order[: len(scored)]
    raise ValueError(f"sequence {uid} was not traced")


def _exits(plan: PolicyPlan, threshold: float, number: int, shard: Arrays, rows: np.ndarray) -> np.ndarray:
    if plan.rule is None:
        return np.asarray(plan.exits([threshold])(number, shard)[0][rows])
    scores = shard[f"score/{plan.rule.signal}"]
    bound = signed_threshold(np.array([threshold]), plan.rule, scores.dtype)[0]
    return exits_at(running_extremum(scores[rows], plan.rule), bound)
