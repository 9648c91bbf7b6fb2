"""Where text benchmarks come from: the pages in lm-eval (`docs`, `masked`), a file or folder of the user's (`text:PATH`)."""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from halting_bench.benchmarks.masked import MaskedBenchmark
from halting_bench.benchmarks.text import DocumentBenchmark, TextBenchmark
from halting_bench.errors import UserError

BLOCK_BYTES = 2048  # a single file is cut into documents of about this size
MIN_PAGE_BYTES = 128  # a documentation page of which less is left after cleaning says nothing
MAX_FOREIGN_LETTERS = 0.02  # a page with a larger share of letters outside ASCII is not English


def docs_benchmark() -> TextBenchmark:
    """Each byte of the pages of lm-eval's tasks, predicted from those before it. Raises UserError as `_docs_pages` does."""
    return TextBenchmark("docs", *_docs_pages("docs"))


def masked_benchmark() -> MaskedBenchmark:
    """Hidden bytes of the same pages, predicted from both sides. Raises UserError as `_docs_pages` does."""
    return MaskedBenchmark("masked", *_docs_pages("masked"))


PAGE_BENCHMARKS: dict[str, Callable[[], DocumentBenchmark]] = {"docs": docs_benchmark, "masked": masked_benchmark}
"""What is asked of those pages, by name."""


def _docs_pages(benchmark: str) -> tuple[list[bytes], dict]:
    """The English documentation pages of the tasks inside the installed lm-eval, which is not imported, and their source.

    Every README.md below its tasks folder, but for the index of all tasks; lines that occur in more than one page are
    dropped, for they are boilerplate that a model could learn from one page and collect on the next.

    Raises:
        UserError: lm-eval is not installed.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"benchmark '{benchmark}' reads pages inside lm-eval, which is not installed: pip install 'lm-eval>=0.4.13,<0.5'"
        )
    version = importlib.metadata.version("lm-eval")
    tasks = Path(spec.submodule_search_locations[0]) / "tasks"
    pages = {path.relative_to(tasks).as_posix(): path.read_bytes() for path in tasks.rglob("README.md") if path.parent != tasks}
    texts = {name: page.decode("utf-8") for name, page in sorted(pages.items())}
    english = {name: text for name, text in texts.items() if _share_of_foreign_letters(text) <= MAX_FOREIGN_LETTERS}
    kept = {name: text.encode() for name, text in _without_shared_lines(english).items()}
    kept = {name: text for name, text in kept.items() if len(text) >= MIN_PAGE_BYTES}
    if not kept:
        raise UserError(f"benchmark '{benchmark}' finds no page in lm-eval {version}: pip install --force-reinstall lm-eval")
    source = {
        "kind": "docs",
        "lm_eval": version,
        "min_page_bytes": MIN_PAGE_BYTES,
        "max_foreign_letters": MAX_FOREIGN_LETTERS,
        "shared_lines": "dropped",
        "files": [{"path": name, "sha256": hashlib.sha256(pages[name]).hexdigest()} for name in kept],
    }
    return list(kept.values()), source


def _share_of_foreign_letters(text: str) -> float:
    letters = [character for character in text if character.isalpha()]
    return sum(not character.isascii() for character in letters) / max(1, len(letters))


def _without_shared_lines(texts: dict[str, str]) -> dict[str, str]:
    """Drops each line that more than one text holds (compared without outer spaces), then runs of blank lines."""
    count = Counter(line for text in texts.values() for line in {line.strip() for line in text.splitlines()})
    cleaned = {}
    for name, text in texts.items():
        own = (line.rstrip() for line in text.splitlines() if not line.strip() or count[line.strip()] == 1)
        cleaned[name] = re.sub(r"\n{3,}", "\n\n", "\n".join(own)).strip()
    return cleaned


def text_benchmark(path: str) -> TextBenchmark:
    """A UTF-8 file or folder of the user's. In a folder every file is a document; a single file is cut into blocks.

    Only what lies inside `path` is read: a link that leads out is refused. Hidden and empty files are left out and noted.

    Raises:
        UserError: nothing there, or a file that is not UTF-8 text.
    """
    root = Path(path).expanduser()
    if not os.path.exists(root):
        raise UserError(f"text path '{path}' does not exist: type text:PATH with a UTF-8 file or folder")
    if root.is_dir():
        files, notes = _files_inside(root)
        texts = {name: read for name, file in files.items() if (read := _read_utf8(file))}
        notes += [f"left out {name}: empty" for name in files if name not in texts]
        documents = list(texts.values())
    else:
        texts, notes = {root.name: _read_utf8(root)}, []
        documents = blocks(texts[root.name])
    if not documents:
        raise UserError(f"text path '{path}' holds no text: type text:PATH with a UTF-8 file or folder that is not empty")
    source = {
        "kind": "text",
        "block_bytes": None if root.is_dir() else BLOCK_BYTES,
        "files": [{"path": name, "sha256": hashlib.sha256(data).hexdigest()} for name, data in texts.items()],
    }
    return TextBenchmark(f"text:{path}", documents, source, tuple(notes))


def _files_inside(root: Path) -> tuple[dict[str, Path], list[str]]:
    """The files to read by their name below `root`, sorted, and what was left out."""
    found, notes = {}, []
    home = Path(os.path.realpath(root))

    def visit(folder: Path) -> None:
        try:
            entries = sorted(folder.iterdir())
        except OSError as error:
            raise UserError(f"cannot read folder '{folder}' ({error.strerror}): give yourself access to it") from error
        for entry in entries:
            name = entry.relative_to(root).as_posix()
            if entry.is_symlink() and not Path(os.path.realpath(entry)).is_relative_to(home):
                raise UserError(f"'{entry}' is a link out of '{root}': copy the file in, or remove the link")
            if entry.name.startswith("."):
                notes.append(f"left out {name}: hidden")
            elif entry.is_symlink():
                notes.append(f"left out {name}: a link inside the folder")
            elif entry.is_dir():
                visit(entry)
            elif entry.is_file():
                found[name] = entry
            else:
                notes.append(f"left out {name}: not a regular file")

    visit(root)
    return found, notes


def _read_utf8(path: Path) -> bytes:
    """The bytes of a file that must be UTF-8 text without NUL, which is the beginning-of-document token."""
    if not path.is_file():
        raise UserError(f"'{path}' is not a regular file: type text:PATH with a UTF-8 file or folder")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read '{path}' ({error.strerror}): give yourself access to it") from error
    if b"\0" in data:
        raise UserError(f"'{path}' is binary (NUL at byte {data.index(0)}): type text:PATH with a UTF-8 text file")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"'{path}' is not UTF-8 (byte {error.start}): convert it, e.g. iconv -f latin1 -t utf-8 '{path}' > utf8.txt"
        ) from error
    return data


def blocks(data: bytes, size: int = BLOCK_BYTES) -> list[bytes]:
    """Cuts UTF-8 text into contiguous parts of at most `size` bytes: after a line end in a part's second half if there is
    one, else between two characters. Joined again they are `data`.
    """
    parts = []
    start = 0
    while start < len(data):
        end = min(start + size, len(data))
        if end < len(data):
            line_end = data.rfind(b"\n", start + size // 2, end)
            if line_end >= 0:
                end = line_end + 1
            while data[end] & 0xC0 == 0x80:  # a continuation byte: the character began before
                end -= 1
        parts.append(data[start:end])
        start = end
    return parts
