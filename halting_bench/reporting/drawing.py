"""Figures to files, drawn with matplotlib's Agg backend: bytes that depend on the data alone."""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halting_bench.reporting.style import DPI, RC
from halting_bench.store import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS: dict[str, dict[str, Any]] = {
    "svg": {"metadata": {"Date": None}},
    "png": {"metadata": {"Software": None}, "dpi": DPI},
}


@contextmanager
def our_look(**settings: Any) -> Iterator[None]:
    """Our settings over matplotlib's own defaults, so that a user's matplotlibrc changes nothing, nor is changed."""
    import matplotlib

    ours: Any = {**matplotlib.rcParamsDefault, **RC, "backend": "agg", **settings}
    with matplotlib.rc_context(ours):
        yield


def write_figures(drawings: Mapping[str, Callable[[], "Figure | None"]], folder: Path) -> list[Path]:
    """Writes each figure that has something to show as `<name>.svg` and `<name>.png`; returns what was written."""
    written = []
    with our_look():
        for name, draw in drawings.items():
            figure = draw()
            if figure is None:
                continue
            for ending, options in _FORMATS.items():
                path = folder / f"{name}.{ending}"
                buffer = io.BytesIO()
                figure.savefig(buffer, format=ending, **options)
                write_bytes(path, buffer.getvalue())
                written.append(path)
    return written
