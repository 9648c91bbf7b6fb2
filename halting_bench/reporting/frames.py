"""Reading a run's frames: the cells of one (model, benchmark), the points that were chosen, and which policy did best.

A cell's points are matched by (policy, threshold); over several seeds their figures are averaged.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from halting_bench.reporting.table import Kind
from halting_bench.reporting.text import format_cell
from halting_bench.store import Run

if TYPE_CHECKING:
    import pandas as pd

POINT = ["policy", "threshold"]
ORACLES = ("oracle-loss", "oracle-saturation")


def is_control(policy: str) -> bool:
    """Whether a name is a control's: something to measure rules against, not a rule to deploy."""
    return policy == "fixed" or policy in ORACLES or policy.startswith("random@")


def pairs(run: Run) -> list[tuple[str, str]]:
    """The (model, benchmark) pairs, in the order in which they were run."""
    return list(run.points[["model", "benchmark"]].drop_duplicates().itertuples(index=False, name=None))


def of_pair(frame: "pd.DataFrame", model: str, benchmark: str) -> "pd.DataFrame":
    """The rows of one pair; an absent frame stays empty."""
    return frame if frame.empty else frame[(frame["model"] == model) & (frame["benchmark"] == benchmark)]


def select(
    points: "pd.DataFrame", split: str, *, subset: str = "all", evidence: str = "replayed", status: str = "ok"
) -> "pd.DataFrame":
    """The points of one split, subset and kind of evidence, one row a (policy, threshold): seeds are averaged."""
    chosen = points[
        (points["split"] == split)
        & (points["subset"] == subset)
        & (points["evidence"] == evidence)
        & (points["status"] == status)
    ]
    figures = chosen.select_dtypes("number").columns.difference(POINT)
    return chosen.groupby(POINT, dropna=False, sort=False)[list(figures)].mean().reset_index()


def ranked(run: Run, model: str, benchmark: str) -> list[str]:
    """The policies that reached equal quality, least mean depth on the *calibration* documents first.

    The test documents have no say in which policy is called best, so its test figures are not flattered.
    """
    iso = of_pair(run.iso, model, benchmark)
    iso = iso[(iso["status"] == "ok") & ~iso["policy"].map(is_control)]
    calibration = select(of_pair(run.points, model, benchmark), "calibration")[[*POINT, "mean_depth"]]
    both = iso[POINT].merge(calibration, on=POINT, how="left").sort_values(["mean_depth", "policy"], kind="stable")
    return both["policy"].tolist()


def executed_mode(points: "pd.DataFrame") -> str | None:
    """The kv_mode whose executed rows stand beside the replayed ones: the default one where it ran; None without any."""
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
        """Its rows: policy, threshold, latency with p10 and p90 as the interval, noisy."""
        same = latency[(latency[list(asdict(self))] == list(asdict(self).values())).all(axis=1)].drop_duplicates(POINT)
        chosen = same[[*POINT, "latency_ms_per_token", "p10", "p90", "noisy"]]
        return chosen.rename(columns={"p10": "latency_ms_per_token_lo", "p90": "latency_ms_per_token_hi"})

    def describe(self) -> str:
        return f"{self.phase}, batch rows {self.batch_rows}, {self.mode}, on {self.device}"


def usual_setting(latency: "pd.DataFrame") -> Setting | None:
    """The setting shown beside quality: the fewest batch rows, decoding before prefill, eager before graphed."""
    if latency.empty:
        return None
    keys = (
        latency[["batch_rows", "phase", "mode", "device"]]
        .drop_duplicates()
        .sort_values(["batch_rows", "phase", "mode", "device"])
    )
    return Setting(**keys.iloc[0].to_dict())


def problems(points: "pd.DataFrame") -> list[str]:
    """A line for each policy with cells that did not run: how many of how many, and why."""
    cells = points[points["subset"] == "all"]
    lines = []
    for (policy, status, error), group in cells[cells["status"] != "ok"].groupby(["policy", "status", "error"], sort=False):
        total = int((cells["policy"] == policy).sum())
        reason = f": {error}" if error else ""
        lines.append(f"{policy}: {len(group)} of {total} cells {status.replace('_', ' ')}{reason}")
    return lines


def chosen_points(run: Run, model: str, benchmark: str) -> "pd.DataFrame":
    """The iso-quality rows with what the points know about them: rules by depth, then controls, then what did not run."""
    import pandas as pd

    points = of_pair(run.points, model, benchmark)
    frame = of_pair(run.iso, model, benchmark)
    absent = points[(points["status"] != "ok") & ~points["policy"].isin(frame["policy"])]
    # A cell that never ran has no threshold: one row a policy is enough, and the footnotes count the cells.
    absent = absent.drop_duplicates("policy")[["policy", "status"]]
    frame = pd.concat([frame, absent], ignore_index=True) if len(absent) else frame.reset_index(drop=True)
    test = select(points, "test")
    random = test[test["policy"].str.startswith("random@")].assign(policy=lambda f: f["policy"].str.removeprefix("random@"))
    random = random[[*POINT, "quality"]].rename(columns={"quality": "random_quality"})
    frame = frame.merge(random, on=POINT, how="left").merge(test[[*POINT, "nonfinite_fraction"]], on=POINT, how="left")
    frame = with_executed(frame, points)
    timed = of_pair(run.latency, model, benchmark)
    setting = usual_setting(timed)
    if setting:
        frame = frame.merge(setting.rows(timed), on=POINT, how="left")
    frame["note"] = [note(row) for row in frame.to_dict("records")]
    frame["control"] = frame["policy"].map(is_control)
    frame["group"] = (frame["status"] != "ok") * 2 + (frame["control"] & (frame["status"] == "ok"))
    return frame.sort_values(["group", "mean_depth", "policy"], kind="stable", ignore_index=True)


def with_executed(frame: "pd.DataFrame", points: "pd.DataFrame") -> "pd.DataFrame":
    mode = executed_mode(points)
    if mode is None:
        return frame
    executed = select(points[points["kv_mode"] == mode], "test", evidence="executed")
    executed = executed[[*POINT, "mean_depth", "quality", "quality_lo", "quality_hi"]]
    executed.columns = [*POINT, "executed_depth", "executed_quality", "executed_quality_lo", "executed_quality_hi"]
    frame = frame.merge(executed, on=POINT, how="left")
    return frame.assign(executed_gap=frame["executed_quality"] - frame["quality"])


def note(row: dict) -> str:
    """What a reader must not miss about a point."""
    notes = []
    if row["status"] != "ok":
        notes.append(row["status"].replace("_", " "))
    if row["never_fired_fraction"] == 1:
        notes.append("never fires")
    if row["nonfinite_fraction"] > 0:
        notes.append(f"nonfinite {format_cell(row['nonfinite_fraction'], Kind.PERCENT)} %")
    if row.get("noisy") is True:
        notes.append("noisy")
    return ", ".join(notes)
