"""Reading a run's frames: the points of one (model, benchmark), what was chosen among them, and which policy did best.

A point is a (seed, policy, threshold). Every seed chooses its own thresholds; what is shown is the mean over seeds.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from halting_bench.reporting.table import Kind
from halting_bench.reporting.text import format_cell
from halting_bench.store import Run

if TYPE_CHECKING:
    import pandas as pd

POINT = ["seed", "policy", "threshold"]
ORACLES = ("oracle-loss", "oracle-saturation")


def is_control(policy: str) -> bool:
    """Whether a name is a control's: something to measure rules against, not a rule to deploy."""
    return policy == "fixed" or policy in ORACLES or policy.startswith("random@")


def pairs(run: Run) -> list[tuple[str, str]]:
    """The (model, benchmark) pairs, in the order in which they were run."""
    return list(run.points[["model", "benchmark"]].drop_duplicates().itertuples(index=False, name=None))


def drawn_pairs(run: Run) -> list[tuple[str, str]]:
    """The pairs that have anything to draw: not those of a model without one finite quality."""
    return [pair for pair in pairs(run) if of_pair(run.points, *pair)["quality"].notna().any()]


def of_pair(frame: "pd.DataFrame", model: str, benchmark: str) -> "pd.DataFrame":
    """The rows of one pair; an absent frame stays empty."""
    return frame if frame.empty else frame[(frame["model"] == model) & (frame["benchmark"] == benchmark)]


def select(points: "pd.DataFrame", split: str, *, subset: str = "all", evidence: str | None = None) -> "pd.DataFrame":
    """The points that ran, of one split, subset and kind of evidence: one row a point.

    Evidence None: the one that all points have, replayed where there is any, else executed (several loops, encoders).
    """
    if evidence is None:
        evidence = "replayed" if (points["evidence"] == "replayed").any() else "executed"
    chosen = points[
        (points["split"] == split)
        & (points["subset"] == subset)
        & (points["evidence"] == evidence)
        & (points["status"] == "ok")
    ]
    return chosen.drop_duplicates(POINT)


def over_seeds(frame: "pd.DataFrame", by: list[str]) -> "pd.DataFrame":
    """One row a group: numbers are averaged over its seeds, everything else is the first seed's."""
    groups = frame.groupby(by, dropna=False, sort=False)
    figures = list(frame.select_dtypes("number").columns.difference(by))
    rest = list(frame.columns.difference([*by, *figures]))
    return groups[figures].mean().join(groups[rest].first()).reset_index()


def ranked(run: Run, model: str, benchmark: str) -> list[str]:
    """The policies that reached equal quality with every seed, least mean depth on the *calibration* documents first.

    The test documents have no say in which policy is called best, so its test figures are not flattered.
    """
    iso = of_pair(run.iso, model, benchmark)
    everywhere = (iso["status"] == "ok").groupby(iso["policy"]).all()
    iso = iso[iso["policy"].map(everywhere) & ~iso["policy"].map(is_control)]
    calibration = select(of_pair(run.points, model, benchmark), "calibration")[[*POINT, "mean_depth"]]
    depth = iso[POINT].merge(calibration, on=POINT, how="left").groupby("policy")["mean_depth"].mean()
    return depth.sort_index().sort_values(kind="stable").index.tolist()


def trained_steps(run: Run, model: str, benchmark: str) -> float:
    """The threshold of `fixed` at full depth: steps of each loop, where `full_depth` counts those of all loops."""
    fixed = select(of_pair(run.points, model, benchmark), "test")
    fixed = fixed[fixed["policy"] == "fixed"]
    distance = (fixed["mean_depth"] - of_pair(run.iso, model, benchmark)["full_depth"].max()).abs()
    return float(fixed["threshold"].iloc[distance.argmin()])


def executed_mode(points: "pd.DataFrame") -> str | None:
    """The kv_mode whose executed rows stand beside the replayed ones: the default one where it ran; None without any.

    Nor is there any where nothing was replayed: there executed rows are the rows.
    """
    if not (points["evidence"] == "replayed").any():
        return None
    modes = sorted(points.loc[points["evidence"] == "executed", "kv_mode"].unique(), key=lambda mode: (mode != "latest", mode))
    return modes[0] if modes else None


@dataclass(frozen=True)
class Setting:
    """One way in which points were timed."""

    batch_rows: int
    phase: str
    mode: str
    device: str

    def rows(self, latency: "pd.DataFrame") -> "pd.DataFrame":
        """Its rows: the point, its latency with p10 and p90 as the interval, and whether it is noisy."""
        same = latency[(latency[list(asdict(self))] == list(asdict(self).values())).all(axis=1)].drop_duplicates(POINT)
        chosen = same[[*POINT, "latency_ms_per_token", "p10", "p90", "noisy"]]
        return chosen.rename(columns={"p10": "latency_ms_per_token_lo", "p90": "latency_ms_per_token_hi"})

    def describe(self) -> str:
        return f"{self.phase}, batch rows {self.batch_rows}, {self.mode}, on {self.device}"


def usual_setting(latency: "pd.DataFrame") -> Setting | None:
    """The setting shown beside quality: the fewest batch rows, decoding before prefill, eager before graphed."""
    if latency.empty:
        return None
    order = ["batch_rows", "phase", "mode", "device"]
    return Setting(**latency[order].drop_duplicates().sort_values(order).iloc[0].to_dict())


def problems(points: "pd.DataFrame") -> list[str]:
    """A line for each policy with cells that did not run: how many of how many, and why."""
    replayed = points["evidence"] == "replayed"
    cells = points[(points["subset"] == "all") & (replayed if replayed.any() else True)]
    lines = []
    for (policy, status, error), group in cells[cells["status"] != "ok"].groupby(["policy", "status", "error"], sort=False):
        total = int((cells["policy"] == policy).sum())
        count = f"{len(group)} of {total} cells " if total > len(group) else ""
        lines.append(f"{policy}: {count}{status.replace('_', ' ')}{f': {error}' if error else ''}")
    return lines


def chosen_points(run: Run, model: str, benchmark: str) -> "pd.DataFrame":
    """One row a policy: its iso-quality point and all that the points know of it, averaged over seeds.

    Rules come first, by depth; then the controls; then what has no such point. Columns beyond those of `iso`:
    random_quality, nonfinite_fraction, exit_spread, executed_* and latency where there are any, note, control, group.
    """
    import pandas as pd

    points = of_pair(run.points, model, benchmark)
    frame = of_pair(run.iso, model, benchmark)
    test = select(points, "test")
    random = test[test["policy"].str.startswith("random@")].assign(policy=lambda f: f["policy"].str.removeprefix("random@"))
    random = random[[*POINT, "quality"]].rename(columns={"quality": "random_quality"})
    frame = frame.merge(random, on=POINT, how="left").merge(test[[*POINT, "nonfinite_fraction"]], on=POINT, how="left")
    exits = of_pair(run.exits, model, benchmark)  # executed runs keep none
    frame = frame.assign(exit_spread=float("nan")) if exits.empty else frame.merge(_exit_spread(exits), on=POINT, how="left")
    frame = with_executed(frame, points)
    timed = of_pair(run.latency, model, benchmark)
    setting = usual_setting(timed)
    if setting:
        frame = frame.merge(setting.rows(timed), on=POINT, how="left")
    seeds = frame["seed"].nunique()
    ok = frame[frame["status"] == "ok"]
    reached = ok.groupby("policy").size()
    others = frame[~frame["policy"].isin(ok["policy"])]
    frame = pd.concat([over_seeds(part, ["policy"]) for part in (ok, others) if len(part)], ignore_index=True)
    frame["note"] = [_note(row, int(reached.get(row["policy"], 0)), seeds) for row in frame.to_dict("records")]
    frame["control"] = frame["policy"].map(is_control)
    frame["group"] = (frame["status"] != "ok") * 2 + (frame["control"] & (frame["status"] == "ok"))
    return frame.sort_values(["group", "mean_depth", "policy"], kind="stable", ignore_index=True)


def _exit_spread(exits: "pd.DataFrame") -> "pd.DataFrame":
    """How many steps lie between the first and the last exit of each selected point: 0 where every token stops at one."""
    steps = exits[exits["subset"] == "all"].groupby(POINT, dropna=False, sort=False)["step"]
    return (steps.max() - steps.min()).rename("exit_spread").reset_index()


def with_executed(frame: "pd.DataFrame", points: "pd.DataFrame") -> "pd.DataFrame":
    """Adds executed depth and quality, and the gap to the replayed quality, where points were executed and replayed."""
    mode = executed_mode(points)
    if mode is None:
        return frame
    executed = select(points[points["kv_mode"] == mode], "test", evidence="executed")
    executed = executed[[*POINT, "mean_depth", "quality", "quality_lo", "quality_hi"]]
    executed.columns = [*POINT, "executed_depth", "executed_quality", "executed_quality_lo", "executed_quality_hi"]
    frame = frame.merge(executed, on=POINT, how="left")
    return frame.assign(executed_gap=frame["executed_quality"] - frame["quality"])


def _note(row: dict, reached: int, seeds: int) -> str:
    """What a reader must not miss about a point."""
    notes = []
    if row["status"] != "ok":
        notes.append(row["status"].replace("_", " "))
    elif reached < seeds:
        notes.append(f"{reached} of {seeds} seeds")
    if row["never_fired_fraction"] == 1:
        notes.append("never fires")
    elif row["exit_spread"] == 0 and not is_control(row["policy"]):
        notes.append(f"always at step {row['mean_depth']:g}")
    if row["nonfinite_fraction"] > 0:
        notes.append(f"nonfinite {format_cell(row['nonfinite_fraction'], Kind.PERCENT)} %")
    if row.get("noisy") is True:
        notes.append("noisy")
    return ", ".join(notes)
