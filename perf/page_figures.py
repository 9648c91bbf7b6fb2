"""The HTML page of a run: its size, and how long after it was opened its controls answer in a browser without a screen.

Run: python -m perf.page_figures RUN
"""

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from perf.figure import figure

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
REPEATS = 5
_ACT = """<script>
document.getElementById("all").click();
document.getElementById("pareto").getBoundingClientRect();  // laid out, not only written down
document.documentElement.dataset.answered = performance.now();
</script>"""
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1000", "--dump-dom")


def answered(browser: str, page: str) -> float:
    """Seconds from opening a page until all of its policies were drawn, because the button for that was pressed."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "page.html"
        file.write_text(page.replace("</body>", f"{_ACT}</body>"), encoding="utf-8")
        argv = [browser, *_FLAGS, f"--user-data-dir={scratch}/profile", file.as_uri()]
        seen = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-answered="([\d.]+)"', seen)
    if found is None:
        raise RuntimeError("the page's controls did not answer")
    return float(found[1]) / 1000


def page_rows(run: Path, command: str) -> list[dict]:
    """The figures of a run's page. command: that measures them."""
    from halting_bench.reporting.html import report_page
    from halting_bench.store import load_run

    page = report_page(load_run(run))
    rows = [figure("HTML page of the default sweep", len(page.encode()) / 1e6, "MB", "< 6", command, device="cpu")]
    try:
        if BROWSER is None:
            raise FileNotFoundError("no chromium here")
        seconds = statistics.median(answered(BROWSER, page) for _ in range(REPEATS))
    except (OSError, subprocess.SubprocessError) as error:
        return [*rows, figure(f"HTML page in a browser: not measured, {error}", None, "s", "<= 2", command, device="cpu")]
    name = f"HTML page: from opening it to all policies drawn on a click (median of {REPEATS})"
    return [*rows, figure(name, seconds, "s", "<= 2", command, device="cpu, chromium without a screen")]


if __name__ == "__main__":
    for row in page_rows(Path(sys.argv[1]), f"python -m perf.page_figures {sys.argv[1]}"):
        print(row)
