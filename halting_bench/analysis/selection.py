"""What the calibration documents choose, and what the test documents then say of it.

Input: the rows of one unit (one model, benchmark and seed), subset `all`, both splits, controls included.
"""

from typing import TYPE_CHECKING

import numpy as np

from halting_bench.records import Judged

if TYPE_CHECKING:
    import pandas as pd

DELTAS = [f"delta_{name}{end}" for name in ("uniform", "random") for end in ("", "_lo", "_hi")]
_FOUND = ("quality", "quality_lo", "quality_hi", "mean_depth")
_COUNTED = ("never_fired_fraction", "exhausted_fraction", "flops_per_token")
FIGURES = (*_FOUND, *DELTAS, *_COUNTED, "saving_full", "saving_uniform", "gap_share")
"""What a row says of its point; NaN where there is none."""


def choose_iso(rows: "pd.DataFrame", metric: Judged) -> "pd.Series":
    """Per policy, the index label of its calibration row of least mean depth at full-depth quality (within tolerance).

    Policies that reach it nowhere are absent. Random controls have no choice of their own and are left out.
    """
    sign = 1 if metric.higher_is_better else -1
    known = rows[(rows["split"] == "calibration") & (rows["status"] == "ok") & ~rows["policy"].str.startswith("random@")]
    good = known[sign * known["quality"] >= sign * known["quality_full_depth"] - metric.tolerance]
    return good.groupby("policy", sort=False)["mean_depth"].idxmin()


def mark_iso(rows: "pd.DataFrame", metric: Judged) -> None:
    """Sets role `iso` on both splits' rows of each policy's iso-quality point, in place; controls keep theirs."""
    chosen = rows.loc[choose_iso(rows, metric)]
    chosen = chosen[chosen["role"] != "control"]
    wanted = set(zip(chosen["policy"], chosen["threshold"], strict=True))
    here = [pair in wanted for pair in zip(rows["policy"], rows["threshold"], strict=True)]
    rows.loc[here, "role"] = "iso"


def iso_rows(rows: "pd.DataFrame", metric: Judged, full_depth: int) -> "pd.DataFrame":
    """One row a policy: its iso-quality point, chosen on calibration, judged on test, against uniform depth and oracle.

    A policy that never reaches full-depth quality on calibration keeps a row that says so.
    """
    import pandas as pd

    sign = 1 if metric.higher_is_better else -1
    chosen = choose_iso(rows, metric)
    test = rows[(rows["split"] == "test") & (rows["status"] == "ok")]
    point = test.set_index(["policy", "threshold"])
    uniform_depth = float(rows.loc[chosen["fixed"], "mean_depth"]) if "fixed" in chosen.index else np.nan
    oracle = test[test["policy"] == "oracle-loss"].sort_values("mean_depth")
    optimistic = bool(oracle["params"].str.contains("true").any())
    uniform = test[test["policy"] == "fixed"].sort_values("threshold")
    full = uniform[uniform["threshold"] == full_depth]
    full_steps = float(full["mean_depth"].iloc[0]) if len(full) else float(full_depth)  # in all loops
    out = []
    for policy in rows["policy"].drop_duplicates():
        if policy.startswith("random@"):
            continue
        given = rows.loc[rows["policy"] == policy].iloc[0]
        row = {
            "policy": policy,
            "threshold": np.nan,
            "status": given["status"],
            "error": given["error"],
            "full_quality": float(full["quality"].iloc[0]) if len(full) else np.nan,
            "full_depth": full_steps,
            "uniform_depth": uniform_depth,
            "gap_optimistic": optimistic,
            **dict.fromkeys(FIGURES, np.nan),
        }
        if given["status"] == "ok" and policy not in chosen.index:
            row |= {"status": "unreached", "error": "no threshold keeps full-depth quality on the calibration documents"}
        elif given["status"] == "ok":
            threshold = rows.loc[chosen[policy], "threshold"]
            found = (
                point.loc[[(policy, threshold)]].iloc[0] if threshold == threshold else test[test["policy"] == policy].iloc[0]
            )
            depth, quality = float(found["mean_depth"]), float(found["quality"])
            at_same = float(np.interp(depth, uniform["mean_depth"], uniform["quality"]))
            inside = len(oracle) > 1 and oracle["mean_depth"].iloc[0] <= depth <= oracle["mean_depth"].iloc[-1]
            best = float(np.interp(depth, oracle["mean_depth"], oracle["quality"])) if inside else np.nan
            room = sign * (best - at_same)
            row |= {
                "threshold": threshold,
                **{name: float(found[name]) for name in _FOUND},
                **{name: float(found[name]) if name in found else np.nan for name in DELTAS},
                **{name: float(found[name]) for name in _COUNTED},
                "saving_full": 1 - depth / full_steps,
                "saving_uniform": 1 - depth / uniform_depth,
                "gap_share": sign * (quality - at_same) / room if room > 0 else np.nan,
            }
        out.append(row)
    return pd.DataFrame(out)
