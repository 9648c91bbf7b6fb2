"""A gate in GitHub Actions: annotations as workflow commands, and the job's summary, inside their limits.

Limits: ten errors and ten warnings a step are shown, a summary holds 1 MiB a step (GitHub's documentation of workflow
commands and job summaries).
"""

import os
from collections.abc import Mapping
from pathlib import Path

from halting_bench.analysis.gate import Judgement, Verdict
from halting_bench.errors import UserError
from halting_bench.reporting.exports import render
from halting_bench.reporting.gate import gate_table, ordered, sentence

ANNOTATIONS = 10
SUMMARY_BYTES = 1 << 20


def annotations(judgements: list[Judgement]) -> list[str]:
    """Workflow commands, the gravest first; the last one of a kind says how many more there are."""
    lines = []
    for level in ("error", "warning"):
        found = [each for each in ordered(judgements) if _level(each) == level]
        shown = found if len(found) <= ANNOTATIONS else found[: ANNOTATIONS - 1]
        lines += [
            f"::{level} title={_property(f'{each.verdict.value}: {each.title}')}::{_data(sentence(each))}" for each in shown
        ]
        if len(shown) < len(found):
            lines.append(f"::{level} title=halting-bench gate::{len(found) - len(shown)} more, see the job summary")
    return lines


def _level(judgement: Judgement) -> str | None:
    if judgement.verdict is Verdict.PASS:
        return None
    return "warning" if judgement.softened else "error"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def job_summary(judgements: list[Judgement], room: int = SUMMARY_BYTES) -> str:
    """The table as Markdown; as many rows as fit, the gravest first, and a line that says how many do not.

    Args:
        judgements: all of them.
        room: bytes left in the summary.
    """
    kept = ordered(judgements)
    while True:
        text = render(gate_table(kept), "md")
        if len(kept) < len(judgements):
            text += f"\n{len(judgements) - len(kept)} more rows did not fit into the summary.\n"
        if len(text.encode()) <= room or not kept:
            return text if len(text.encode()) <= room else ""
        kept = kept[: len(kept) // 2]


def tell_github(judgements: list[Judgement], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Appends the summary and returns the annotations to print; nothing outside GitHub Actions."""
    if environment.get("GITHUB_ACTIONS") != "true":
        return []
    path = environment.get("GITHUB_STEP_SUMMARY")
    if path:
        file = Path(path)
        try:
            used = file.stat().st_size if file.exists() else 0
            with open(file, "a", encoding="utf-8") as summary:
                summary.write(job_summary(judgements, SUMMARY_BYTES - used))
        except OSError as error:
            raise UserError(f"cannot write the job summary {path} ({error.strerror}): check GITHUB_STEP_SUMMARY") from None
    return annotations(judgements)
