"""What a reader of a run's figures must not miss, one line each."""

from halting_bench.reporting.frames import chosen_points, is_control, of_pair, pairs, problems
from halting_bench.reporting.table import Kind
from halting_bench.reporting.text import format_cell
from halting_bench.store import Run

FEW_DOCUMENTS = 30


def caveats(run: Run) -> list[str]:
    """The gravest first; empty when there are none."""
    where: dict[str, list[str]] = {}
    for model, benchmark in pairs(run):
        for line in _of_pair(run, model, benchmark):
            where.setdefault(line, []).append(f"{model} on {benchmark}")
    count = len(pairs(run))
    lines = [f"{'everywhere' if len(found) == count > 1 else ', '.join(found)}: {line}" for line, found in where.items()]
    environment = run.manifest.get("environment", {})
    if environment.get("dirty"):
        lines.append("The code had uncommitted changes: this run cannot be made again from its commit alone.")
    if not run.latency.empty and (environment.get("device") or {}).get("type") == "cpu":
        lines.append(f"Latency is of a CPU with {environment['device'].get('threads')} threads.")
    return lines


def _of_pair(run: Run, model: str, benchmark: str) -> list[str]:
    points, chosen = of_pair(run.points, model, benchmark), chosen_points(run, model, benchmark)
    lines = []
    rules = chosen[~chosen["policy"].map(is_control)]
    never = rules.loc[rules["never_fired_fraction"] == 1, "policy"].tolist()
    if never:
        lines.append(f"at equal quality these never fire: {', '.join(never)}.")
    unreached = rules.loc[rules["status"] == "unreached", "policy"].tolist()
    if unreached:
        lines.append(f"no threshold keeps full-depth quality: {', '.join(unreached)}.")
    broken = chosen[chosen["nonfinite_fraction"] > 0]
    lines += [
        f"{row['policy']}: the state of {format_cell(row['nonfinite_fraction'], Kind.PERCENT)} % of tokens was not finite."
        for row in broken.to_dict("records")
    ]
    unclear = rules[(rules["delta_uniform_lo"] < 0) & (rules["delta_uniform_hi"] > 0)]["policy"].tolist()
    if unclear:
        lines.append(f"not told apart from uniform depth at equal mean depth: {', '.join(unclear)}.")
    if chosen["gap_optimistic"].any():
        lines.append("the loss oracle is optimistic: one seed chose and scored its exits.")
    documents = int(points.loc[points["split"] == "test", "n_documents"].max())
    if documents < FEW_DOCUMENTS:
        lines.append(f"only {documents} test documents: the intervals are wide and rough.")
    timed = of_pair(run.latency, model, benchmark)
    if not timed.empty:
        noisy = timed.loc[timed["noisy"] == True, "policy"].drop_duplicates().tolist()  # noqa: E712  (a column with NaN)
        lines += [f"noisy latency: {', '.join(noisy)}."] if noisy else []
    return lines + [f"{line}." for line in problems(points)]
