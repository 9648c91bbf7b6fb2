"""Executed sweeps: every operating point acted out, for models of several loops and for encoders, where replay ends.

A point gives each loop its own threshold: the same number in every loop where the recipe names one, and otherwise the
thresholds at which each loop, running alone to full depth, would stop at the same mean step.
Shapes: G operating points, N scored positions, L loops, R = max_steps, M documents.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halting_bench.analysis.statistics import paired_difference
from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.base import Benchmark, Sequence
from halting_bench.engine.controls import uniform_at
from halting_bench.engine.multi_loop import GivenDepth, Stacked, execute_stacked, loop_scores, scored_positions
from halting_bench.engine.points import SPLITS
from halting_bench.engine.replay import Rule, Tally, row_tokens
from halting_bench.executed_grid import depth_thresholds, never_fires
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.plan import PolicyPlan, build_policy
from halting_bench.records import Metric, Outcome
from halting_bench.tabulation import outcome_columns
from halting_bench.unit import blank_row

if TYPE_CHECKING:
    import pandas as pd

RANDOM_STREAM = 0x7264


@dataclass(frozen=True)
class Setting:
    """How the points are run."""

    max_steps: int
    calibration: int  # the first so many documents choose; the rest test
    seed: int = 0
    kv_mode: str = "latest"
    batch_rows: int = 8192


def executed_cells(
    model: RecurrentModel,
    benchmark: Benchmark,
    documents: list[int],
    plans: tuple[PolicyPlan, ...],
    setting: Setting,
    *,
    draw: Callable[[list[Sequence]], list[Sequence]] = list,
) -> Iterator[tuple[str, Callable[[], "pd.DataFrame"]]]:
    """Uniform depths and every policy, by name, with what makes its rows: of both splits, its points and their random controls.

    Args:
        model: of any family whose rows can be packed.
        benchmark: what it is asked.
        documents: ids in sample order.
        plans: policies resolved against the model.
        setting: how they are run.
        draw: which of a document's sequences are used.

    Yields:
        The columns of `tabulation.point_rows`, with `evidence` executed, `depth_per_loop`, and the loops' thresholds in
        `params`; `threshold` is that of the first loop. Subsets have rows on the test documents.
    """
    sequences = [s for document in documents for s in draw(benchmark.sequences(document))]
    rows = _Rows(model, benchmark, list(documents), sequences, setting)
    yield "fixed", rows.uniform_rows
    for plan in plans:
        yield plan.recipe.name, lambda plan=plan: rows.policy_rows(plan)  # type: ignore[misc]


class _Rows:
    """Executes points over one sample and puts them into rows."""

    def __init__(
        self, model: RecurrentModel, benchmark: Benchmark, documents: list[int], sequences: list[Sequence], setting: Setting
    ):
        self.model, self.benchmark, self.sequences, self.setting = model, benchmark, sequences, setting
        self.metric, self.loops, self.documents = benchmark.metric, len(model.spec.loops), len(documents)
        self.costs = model.costs()
        place = {document: index for index, document in enumerate(documents)}
        self.owner = np.array([place[s.document] for s in sequences])
        lengths = np.array([len(s.tokens) for s in sequences])
        self.scored = scored = scored_positions(sequences)
        self.document, self.all_positions = np.repeat(self.owner, lengths)[scored], int(lengths.sum())
        self.context = np.concatenate([np.arange(1, n + 1) if model.spec.causal else np.full(n, n) for n in lengths])[scored]
        self.codes = {f: np.concatenate([s.codes[f] for s in sequences])[scored] for f in benchmark.subset_names}
        self.depths = np.repeat(np.arange(1.0, setting.max_steps + 1)[:, None], self.loops, axis=1)
        self.uniform_run = self._run(GivenDepth(), self.depths[:, None])

    def uniform_rows(self) -> "pd.DataFrame":
        """Every loop at the same depth, 1..R."""
        return self._tabulate("fixed", self.depths, self.uniform_run, "control", None)

    def policy_rows(self, plan: PolicyPlan) -> "pd.DataFrame":
        """A policy's points and their random controls, or one row that says why there are none."""
        import pandas as pd

        reason, rule = plan.not_applicable, plan.rule
        if rule is None:
            reason = reason or "executed sweeps take one threshold on one signal"
        if reason or rule is None:
            return pd.DataFrame([blank_row(plan.recipe.name, "not_applicable", reason) | {"evidence": "executed"}])
        scores = self._scores(rule)
        thresholds = self._thresholds(plan, rule, scores)
        watched = self._watched(plan)
        never = never_fires(scores[:, :watched], rule, thresholds[:, :watched])
        done = self._run_firing(build_policy(plan.recipe, float("nan")), thresholds[:, None], never)
        drawn = self._run_firing(GivenDepth(), self._drawn(done), never)
        return pd.concat(
            [
                self._tabulate(plan.recipe.name, thresholds, done, "grid", plan),
                self._tabulate(f"random@{plan.recipe.name}", thresholds, drawn, "control", None),
            ],
            ignore_index=True,
        )

    def _scores(self, rule: Rule) -> np.ndarray:
        """[P, L, R] of the rule's signal, nothing stopping."""
        found = loop_scores(
            self.model,
            self.sequences,
            (rule.signal,),
            max_steps=self.setting.max_steps,
            seed=self.setting.seed,
            batch_rows=self.setting.batch_rows,
        )
        return found[rule.signal]

    def _thresholds(self, plan: PolicyPlan, rule: Rule, scores: np.ndarray) -> np.ndarray:
        """[G, L]: the recipe's numbers, and quantiles from the calibration documents at full depth (jointly: of the first)."""
        scores = scores[self.scored][self.document < self.setting.calibration]
        count = plan.recipe.grid.quantiles
        watched = [0] * self.loops if plan.recipe.jointly else range(self.loops)
        quantiles = np.stack([depth_thresholds(scores[:, loop], rule, count) for loop in watched], axis=1)
        absolute = np.repeat(np.array(plan.recipe.grid.absolute, float)[:, None], self.loops, axis=1)
        return np.unique(np.concatenate((absolute, quantiles)), axis=0)

    def _run(self, policy: HaltingPolicy, thresholds: np.ndarray) -> Stacked:
        setting = self.setting
        return execute_stacked(
            self.model, self.sequences, policy, thresholds,
            max_steps=setting.max_steps, seed=setting.seed, kv_mode=setting.kv_mode, batch_rows=setting.batch_rows,
        )  # fmt: skip

    def _run_firing(self, policy: HaltingPolicy, thresholds: np.ndarray, never: np.ndarray) -> Stacked:
        """Every point. Those that never fire, bool [G], are the deepest uniform run: nothing is run for them."""
        deepest = self.uniform_run.points(np.array([-1]), never_fired=True)
        if never.all():
            return deepest.points(np.zeros(len(never), np.int64))
        ran = self._run(policy, thresholds[~never])
        return ran.joined(deepest).points(np.where(never, -1, np.cumsum(~never) - 1))

    def _drawn(self, done: Stacked) -> np.ndarray:
        """[G, P, L] exits drawn from each point's own joint histogram: does it matter which tokens stop?"""
        rng = np.random.default_rng([RANDOM_STREAM, self.setting.seed])
        chosen = rng.integers(done.steps.shape[1], size=(len(done.steps), self.all_positions))
        return np.take_along_axis(done.steps, chosen[:, :, None], axis=1).astype(float)

    def _outcome(self, done: Stacked) -> np.ndarray:
        return done.correct.astype(np.float64) if self.metric is Metric.ACCURACY else done.loss / np.log(2)

    def _by_document(self, values: np.ndarray) -> np.ndarray:
        """[G, N] -> [G, M] sums."""
        return np.stack([np.bincount(self.document, value, minlength=self.documents) for value in values])

    def _tabulate(
        self, policy: str, thresholds: np.ndarray, done: Stacked, role: str, plan: PolicyPlan | None
    ) -> "pd.DataFrame":
        import pandas as pd

        frames = []
        for split, subset, rows in self._parts(subsets=not policy.startswith("random@")):
            frame = self._part(done, rows, plan).assign(split=split, subset=subset, threshold=thresholds[:, 0])
            frame["params"] = [_params(own, plan) for own in thresholds.tolist()]
            frames.append(frame)
        known = {"evidence": "executed", "kv_mode": self.setting.kv_mode, "prefill": "adaptive", "status": "ok", "error": ""}
        gates = {"hits": plan.recipe.hits, "min_steps": plan.recipe.min_steps} if plan else {"hits": 1, "min_steps": 1}
        return pd.concat(frames, ignore_index=True).assign(policy=policy, role=role, **known, **gates)

    def _parts(self, subsets: bool) -> Iterator[tuple[str, str, np.ndarray]]:
        """(split, subset, which rows, bool [N]); subsets on the test documents only, where they have rows."""
        calibrates = self.document < self.setting.calibration
        for split in SPLITS:
            yield split, "all", calibrates if split == "calibration" else ~calibrates
        for family, names in self.benchmark.subset_names.items() if subsets else ():
            for code, name in enumerate(names):
                rows = ~calibrates & (self.codes[family] == code)
                if rows.any():
                    yield "test", f"{family}:{name}", rows

    def _part(self, done: Stacked, rows: np.ndarray, plan: PolicyPlan | None) -> "pd.DataFrame":
        """Columns of G points over some of the rows, bool [N]."""
        steps, outcome = done.steps[:, rows], np.where(rows, self._outcome(done), 0.0)
        depth, counts = steps.sum(axis=2), np.bincount(self.document[rows], minlength=self.documents)
        flops = self._flops(steps, self.context[rows], plan)
        tally = Tally(
            quality=self._by_document(outcome),
            depth=np.stack([np.bincount(self.document[rows], d, minlength=self.documents) for d in depth]).astype(np.int64),
            histogram=np.stack([np.bincount(d - 1, minlength=self.loops * self.setting.max_steps) for d in depth]),
            halted=(done.outcome[:, rows] == Outcome.HALTED).sum(axis=1),
            never=done.never_fired[:, rows].sum(axis=1),
            nonfinite=(done.outcome[:, rows] == Outcome.NONFINITE).sum(axis=1),
            step_flops=flops,
            fingerprint=self._fingerprints(rows, steps),
        )
        kept = counts > 0
        frame = outcome_columns(tally.quality[:, kept], counts[kept], tally, self.metric)
        looks, answer = self._readouts(steps, plan)
        frame["readouts"] = (looks + answer).sum(axis=1)
        frame["flops_per_token"] = flops / rows.sum()
        uniform = self._by_document(np.where(rows, self._outcome(self.uniform_run), 0.0))[:, kept]
        frame["quality_full_depth"] = uniform[self.model.spec.mean_recurrence - 1].sum() / counts.sum()
        frame["depth_per_loop"] = [json.dumps([round(float(d), 4) for d in mean]) for mean in steps.mean(axis=1)]
        frame["fingerprint"] = tally.fingerprint.astype(str)
        sign = 1 if self.metric.higher_is_better else -1
        same_depth = uniform_at(frame["mean_depth"].to_numpy() / self.loops, uniform)
        both = zip(tally.quality[:, kept], same_depth, strict=True)
        found = np.array([paired_difference(sign * own, sign * other, counts[kept]) for own, other in both])
        frame["delta_uniform"], frame["delta_uniform_lo"], frame["delta_uniform_hi"] = found.T
        return frame

    def _fingerprints(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """uint64 [G]: equal exits in every loop have equal fingerprints. steps: [G, N', L] of the rows."""
        number = np.flatnonzero(rows)
        total = np.zeros(len(steps), np.uint64)
        for loop in range(self.loops):
            tokens = row_tokens(number * self.loops + loop, self.setting.max_steps)
            total += tokens[np.arange(len(number)), steps[:, :, loop] - 1].sum(axis=1, dtype=np.uint64)
        return total

    def _flops(self, steps: np.ndarray, context: np.ndarray, plan: PolicyPlan | None) -> np.ndarray:
        """[G] FLOPs of rows that stopped after `steps` [G, N', L], each attending to `context` [N'] positions."""
        each = {stage: cost.fixed + cost.per_context * context for stage, cost in self.costs.items()}
        looks, answer = self._readouts(steps, plan)
        total = each["embed"] + each["readout"] * (looks + answer)
        for loop in range(self.loops):
            watching = plan.signal_flops if plan and loop < self._watched(plan) else 0.0
            total = total + steps[:, :, loop] * (each[f"step/{loop}"] + watching)
        return total.sum(axis=1)

    def _watched(self, plan: PolicyPlan) -> int:
        """The policy looks at the steps of so many loops."""
        return 1 if plan.recipe.jointly else self.loops

    def _readouts(self, steps: np.ndarray, plan: PolicyPlan | None) -> tuple[np.ndarray, int]:
        """Readouts that the rule looks at, [G, N'], and the answer's own: 0 where the rule's last look was the answer."""
        if plan is None or not plan.needs_logits:
            return np.zeros(steps.shape[:2], np.int64), 1
        watched = self._watched(plan)
        return steps[:, :, :watched].sum(axis=2), int(watched < self.loops)


def _params(thresholds: list[float], plan: PolicyPlan | None) -> str:
    """JSON of what `threshold` alone does not say of a point."""
    told: dict[str, object] = {"thresholds": thresholds} if len(set(thresholds)) > 1 else {}
    return json.dumps(told | ({"provisional": True} if plan and plan.needs_logits else {}))
