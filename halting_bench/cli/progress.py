"""Progress bars on stderr, only where a person watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from halting_bench.sweeping.run import Progress, Silent


@contextmanager
def bars() -> Iterator[Progress]:
    """Bars with what is left while the block runs; nothing when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield _Quiet()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as shown:
        yield _Bars(shown.add_task, shown.advance)


class _Quiet(Silent):
    def note(self, text: str) -> None:
        print(f"note: {text}", file=sys.stderr)


class _Bars:
    def __init__(self, add: Callable[..., object], advance: Callable[..., None]):
        self._add, self._advance = add, advance

    def start(self, what: str, total: int) -> Callable[[], None]:
        task = self._add(what, total=total)
        return lambda: self._advance(task)

    def note(self, text: str) -> None:
        print(f"note: {text}", file=sys.stderr)
