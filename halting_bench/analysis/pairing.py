"""Two runs, document by document: the same test documents of a (model, benchmark), with each run's selected points.

Shapes: G points of a run, M documents, B bootstrap draws.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from halting_bench.analysis.statistics import influence
from halting_bench.store import Run

if TYPE_CHECKING:
    import pandas as pd

DRAWS = 400

Figures = tuple[np.ndarray, np.ndarray]
"""Mean depth and quality of points in each draw, [B, G] each."""

Controls = dict[str, Figures]
"""Policy -> the figures of its points."""


class Incomparable(Exception):
    """The two runs measured different things."""


class Incomplete(Exception):
    """A run lacks what the comparison is about; the same sweep with other settings would have it."""


class Point(NamedTuple):
    """An operating point. A policy without a threshold has NaN, which here equals itself."""

    policy: str
    threshold: float

    def same(self, other: "Point") -> bool:
        """Whether both are one point, whatever the precision in which a threshold was written."""
        if self.policy != other.policy:
            return False
        if math.isnan(self.threshold) or math.isnan(other.threshold):
            return math.isnan(self.threshold) and math.isnan(other.threshold)
        return math.isclose(self.threshold, other.threshold, rel_tol=1e-6)


@dataclass(frozen=True)
class Side:
    """What one run says of the shared documents: sums by document [G, M], and what they are means over.

    Depth is a mean over tokens. So is quality, unless a task scores whole documents; and tokens that points make
    themselves are as many as each made. Counts that all points share are one row, [1, M].
    """

    selected: tuple[Point, ...]  # [G]
    quality: np.ndarray
    depth: np.ndarray
    scored: np.ndarray  # int64, what quality is a mean over
    tokens: np.ndarray  # int64
    points: "pd.DataFrame"  # its test rows, subset all
    curves: "pd.DataFrame"  # its exact test curves; none of executed points
    iso: dict[str, float]  # policy -> threshold of least depth at equal quality; absent where it reached none

    def row(self, point: Point) -> int:
        """Raises Incomplete when the run kept no figures by document of that point."""
        found = next((row for row, own in enumerate(self.selected) if own.same(point)), None)
        if found is None:
            raise Incomplete(f"{point.policy} at threshold {point.threshold:.6g} has no figures by document")
        return found

    def mean_quality(self, rows: int | list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Of one point or several: value [...], and each document's influence on it [..., M] (see `influence`)."""
        return influence(self.quality[rows], rows_of(self.scored, rows))

    def mean_depth(self, rows: int | list[int]) -> tuple[np.ndarray, np.ndarray]:
        """As `mean_quality`."""
        return influence(self.depth[rows], rows_of(self.tokens, rows))

    def of_policy(self, policy: str) -> list[int]:
        """Its points, in no order."""
        rows = [row for row, point in enumerate(self.selected) if point.policy == policy]
        if not rows:
            raise Incomplete(f"{policy} has no figures by document")
        return rows


def rows_of(counts: np.ndarray, rows: int | list[int]) -> np.ndarray:
    """The counts of some points: [M], or [G', M] where each has its own."""
    return counts[0] if len(counts) == 1 else counts[rows]


@dataclass(frozen=True)
class Pair:
    """Both sides of a (model, benchmark)."""

    model: str
    benchmark: str
    evidence: str
    documents: int
    base: Side
    head: Side
    metric: str
    higher_is_better: bool
    max_steps: int
    same_model: bool

    @property
    def sign(self) -> int:
        return 1 if self.higher_is_better else -1

    @cached_property
    def weights(self) -> np.ndarray:
        """How often each draw of a bootstrap over documents holds each document, float64 [B, M]: the same for both sides."""
        generator, documents = np.random.default_rng(0), self.documents
        weights = np.empty((DRAWS, documents))
        for draw in weights:
            draw[:] = np.bincount(generator.integers(documents, size=documents), minlength=documents)
        return weights

    @cached_property
    def whole(self) -> np.ndarray:
        """Every document once: the one draw that is no draw, [1, M]."""
        return np.ones((1, self.documents))

    @cached_property
    def controls(self) -> tuple[list[Controls], list[Controls]]:
        """Of each side, uniform depth and the loss oracle over all documents and in every draw."""
        base, head = (
            [
                {name: figures(side, side.of_policy(name), weights) for name in ("fixed", "oracle-loss")}
                for weights in (self.whole, self.weights)
            ]
            for side in (self.base, self.head)
        )
        return base, head


def figures(side: Side, rows: list[int], weights: np.ndarray) -> Figures:
    """Of some points. weights: [B, M], which is read once for everything."""
    parts = [np.atleast_2d(each) for each in (rows_of(side.tokens, rows), rows_of(side.scored, rows))]
    parts = [side.depth[rows], side.quality[rows], *parts]
    ends = np.cumsum([len(part) for part in parts])[:-1]
    depth, quality, tokens, scored = np.split(weights @ np.vstack(parts).T, ends, axis=1)
    return depth / tokens, quality / scored


def pairs(base: Run, head: Run) -> list[tuple[str, str, str]]:
    """(base's model, head's model, benchmark) of everything both runs measured.

    Models are matched by name; two runs of one model each are matched whatever they are called.
    """
    names = [run.points[["model", "benchmark"]].drop_duplicates() for run in (base, head)]
    models = [list(dict.fromkeys(part["model"])) for part in names]
    matched = {model: model for model in models[0] if model in models[1]}
    if not matched and len(models[0]) == len(models[1]) == 1:
        matched = {models[0][0]: models[1][0]}
    known = set(names[1].itertuples(index=False, name=None))
    return [
        (m, matched[m], b) for m, b in names[0].itertuples(index=False, name=None) if m in matched and (matched[m], b) in known
    ]


def pair(base: Run, head: Run, model: str, head_model: str, benchmark: str, evidence: str = "replayed") -> Pair:
    """Aligns two runs on the test documents that both scored, each with its first seed.

    Raises:
        Incomparable: another benchmark behind the same name, other documents, other tokens in them, another metric.
        Incomplete: a run kept no figures by document.
    """
    hashes = [_benchmark_hash(run, benchmark) for run in (base, head)]
    if hashes[0] != hashes[1]:
        raise Incomparable(f"benchmark {benchmark} is not the same in both runs ({hashes[0]}, {hashes[1]})")
    documents = [_documents(run, name, benchmark, evidence) for run, name in ((base, model), (head, head_model))]
    ids = np.intersect1d(*(part["document"].unique() for part in documents))
    if len(ids) == 0:
        raise Incomparable(f"the runs share no test document of {benchmark}: sweep both with the same --seed and --limit")
    sides = [
        _side(run, name, benchmark, evidence, part, ids)
        for run, name, part in zip((base, head), (model, head_model), documents, strict=True)
    ]
    first, second = (side.tokens for side in sides)
    if len(first) == len(second) == 1 and not np.array_equal(first, second):
        raise Incomparable(f"the documents of {benchmark} have other tokens in each run: tokenizer or sampling changed")
    told = [side.points.iloc[0] for side in sides]
    if told[0]["metric"] != told[1]["metric"]:
        raise Incomparable(f"{benchmark} is scored by {told[0]['metric']} in one run and by {told[1]['metric']} in the other")
    return Pair(
        model=model,
        benchmark=benchmark,
        evidence=evidence,
        documents=len(ids),
        base=sides[0],
        head=sides[1],
        metric=str(told[0]["metric"]),
        higher_is_better=bool(told[0]["higher_is_better"]),
        max_steps=int(told[0]["max_steps"]),
        same_model=told[0]["model_hash"] == told[1]["model_hash"],
    )


def _benchmark_hash(run: Run, benchmark: str) -> str | None:
    return next((each["benchmark_hash"] for each in run.manifest["benchmarks"] if each["benchmark"] == benchmark), None)


def first_seed(frame: "pd.DataFrame", model: str, benchmark: str) -> "pd.DataFrame":
    """The rows of a (model, benchmark) with the least seed."""
    if frame.empty:
        return frame
    own = frame[(frame["model"] == model) & (frame["benchmark"] == benchmark)]
    return own[own["seed"] == own["seed"].min()]


def _documents(run: Run, model: str, benchmark: str, evidence: str) -> "pd.DataFrame":
    frame = first_seed(run.per_document, model, benchmark)
    if not frame.empty:
        frame = frame[(frame["split"] == "test") & (frame["n_tokens"] > 0)]
        # A uniform depth is the same whether replayed or executed: nobody exits before anybody else.
        frame = frame[(frame["evidence"] == evidence) | (frame["policy"] == "fixed")]
    if frame.empty or not (frame["evidence"] == evidence).any():
        others = first_seed(run.per_document, model, benchmark)
        acted = len(others) > 0 and bool(((others["evidence"] == "executed") & (others["n_tokens"] > 0)).any())
        hint = ": nothing was replayed there, so ask for evidence executed" if acted and evidence == "replayed" else ""
        raise Incomplete(f"{run.path} has no {evidence} figures by document of {model} on {benchmark}{hint}")
    return frame


def _coded(frame: "pd.DataFrame") -> tuple[np.ndarray, tuple[Point, ...]]:
    """Each row's point, as a place in the points found. Much faster than grouping millions of rows."""
    import pandas as pd

    policy, names = pd.factorize(frame["policy"])
    threshold, values = pd.factorize(frame["threshold"], use_na_sentinel=False)
    code, found = pd.factorize(policy * len(values) + threshold)
    return code, tuple(Point(str(names[each // len(values)]), float(values[each % len(values)])) for each in found)


def _side(run: Run, model: str, benchmark: str, evidence: str, frame: "pd.DataFrame", ids: np.ndarray) -> Side:
    code, selected = _coded(frame)
    document = frame["document"].to_numpy()
    column = np.minimum(np.searchsorted(ids, document), len(ids) - 1)
    shared = ids[column] == document
    place = code[shared], column[shared]

    def summed(name: str) -> np.ndarray:
        sums = np.full((len(selected), len(ids)), np.nan)
        sums[place] = frame[name].to_numpy(np.float64)[shared]
        return sums

    def counted(name: str) -> np.ndarray:
        counts, every = np.zeros((1, len(ids)), np.int64), frame[name].to_numpy(np.int64)[shared]
        counts[0, place[1]] = every
        if (counts[0, place[1]] != every).any():
            counts = np.zeros((len(selected), len(ids)), np.int64)
            counts[place] = every
        return counts

    tokens = counted("n_tokens")
    points = first_seed(run.points, model, benchmark)
    points = points[(points["split"] == "test") & (points["subset"] == "all")]
    points = points[(points["evidence"] == evidence) | (points["policy"] == "fixed")]
    iso = first_seed(run.iso, model, benchmark)
    reached = iso[iso["status"] == "ok"]
    curves = first_seed(run.curves, model, benchmark).iloc[: None if evidence == "replayed" else 0]  # curves are replayed
    return Side(
        selected=selected,
        quality=summed("quality_sum"),
        depth=summed("depth_sum"),
        scored=counted("quality_count") if "quality_count" in frame and frame["quality_count"].notna().all() else tokens,
        tokens=tokens,
        points=points[points["status"] == "ok"],
        curves=curves[curves["split"] == "test"] if len(curves) else curves,
        iso=dict(zip(reached["policy"], reached["threshold"].astype(float), strict=True)),
    )
