"""What makes the bundled models worth benchmarking, from one replayed sweep of huginn-tiny: whether exits order by
difficulty, and whether a rule beats uniform depth where exits at random do not.
"""

import tempfile
from pathlib import Path
from typing import Any

from perf.figure import figure

COMMAND = "python -m perf models"
TASKS = ("shell", "pancake", "s3")
LATENT, LOGIT = "cosine", "kl"


def measurements() -> list[dict[str, Any]]:
    from scipy.stats import spearmanr

    from halting_bench.store import load_run
    from halting_bench.sweep_config import SweepConfig
    from halting_bench.sweeping.run import sweep

    policies = (LATENT, LOGIT, "entropy", "margin")
    with tempfile.TemporaryDirectory() as folder:
        config = SweepConfig(models=("huginn-tiny",), benchmarks=TASKS, policies=policies, execute=False, plots=False)
        run = load_run(sweep(config, out=Path(folder) / "run"))
    points = run.points[(run.points["role"] == "iso") & run.points["subset"].str.startswith("level:")]
    rows = []
    for task in TASKS:
        for policy in (LATENT, LOGIT):
            depth = points.loc[(points["benchmark"] == task) & (points["policy"] == policy), "mean_depth"].to_numpy()
            name = f"{task}: Spearman of mean depth and level, {policy} at equal quality ({len(depth)} levels)"
            rows.append(figure(name, float(spearmanr(range(len(depth)), depth).statistic), "", ">= 0.9", COMMAND))
        own = run.iso[(run.iso["benchmark"] == task) & (run.iso["policy"] == LOGIT)].iloc[0]
        name = f"{task}: {LOGIT} minus uniform depth at equal mean depth, low end of the 95 % interval"
        rows.append(figure(name, float(own["delta_uniform_lo"]), "accuracy", "> 0", COMMAND))
        name = f"{task}: random exits of {LOGIT} minus uniform depth, high end of the 95 % interval"
        rows.append(figure(name, float(own["delta_random_hi"]), "accuracy", "<= 0", COMMAND))
    return rows
