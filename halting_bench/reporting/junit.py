"""A gate's verdicts as JUnit XML: one suite a (model, benchmark), one case a judgement."""

import io
from pathlib import Path

from halting_bench.analysis.gate import Judgement, Verdict
from halting_bench.reporting.gate import sentence
from halting_bench.store import write_bytes


def write_junit(path: Path, judgements: list[Judgement]) -> None:
    """Writes the file. FAIL is a failure; what could not be judged is an error; what only warns is skipped."""
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    suites: dict[tuple[str, str], TestSuite] = {}
    for each in judgements:
        suite = suites.setdefault((each.model, each.benchmark), TestSuite(f"{each.model} / {each.benchmark}"))
        case = TestCase(_plain(each.title), classname=f"halting_bench.gate.{each.rule.quantity.value}", time=0)
        text = _plain(sentence(each))
        if each.softened:
            case.result = [Skipped(f"{each.verdict.value}: {text}")]
        elif each.verdict is Verdict.FAIL:
            case.result = [Failure(text, each.verdict.value)]
        elif each.verdict is not Verdict.PASS:
            case.result = [Error(text, each.verdict.value)]
        suite.add_testcase(case)
    document = JUnitXml("halting-bench gate")
    for suite in suites.values():
        document.add_testsuite(suite)
    document.update_statistics()
    buffer = io.BytesIO()
    document.write(buffer)
    write_bytes(path, buffer.getvalue())


def _plain(text: str) -> str:
    """XML 1.0 has no control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
