"""Training text, from packages by name: downloaded with their ordinary clients, extracted, never committed.

A corpus is one array of bytes: documents of UTF-8 text, each preceded by a NUL byte, which is also the
beginning-of-document token of a byte-level model.
"""

import ast
import fnmatch
import hashlib
import html
import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tokenize
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from halting_bench.errors import UserError
from halting_bench.records import digest

EXTRACTION_VERSION = 1
BOUNDARY = b"\0"
FORBIDDEN = ("lm-eval", "lm_eval")  # the held-out pages come from it
_BLOCKS = {"p", "div", "li", "tr", "br", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd", "table", "blockquote"}
_SILENT = {"script", "style", "head", "svg", "math", "nav"}


class Source(BaseModel):
    """One package of text.

    `kind` is the client that fetches it; `extract` what is kept: whole text files, the text of HTML pages, the docstrings
    and comments of Python modules, or a Python package's long description. `include` selects files by shell pattern.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["npm", "debian", "pypi", "stdlib"]
    package: str
    version: str | None = None
    extract: Literal["text", "html", "docstrings", "readme"]
    include: str = "*"
    repeat: int = 1


class CorpusSpec(BaseModel):
    """The sources of a corpus and the documents held out of it: one in `holdout_every`, chosen by its content's hash."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: tuple[Source, ...]
    holdout_every: int = 64
    min_bytes: int = 200


class Corpus:
    """The documents of a spec: `train` and `held_out` are uint8 streams, `manifest` says what went in."""

    def __init__(self, train: np.ndarray, held_out: np.ndarray, manifest: dict):
        self.train, self.held_out, self.manifest = train, held_out, manifest
        self.starts = np.flatnonzero(train == 0)


def cache_folder() -> Path:
    """Where downloads are kept: `HALTING_BENCH_CACHE`, or the user's cache folder."""
    root = os.environ.get("HALTING_BENCH_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "halting-bench"
    return Path(root).expanduser() / "corpora"


def build(spec: CorpusSpec, cache: Path | None = None) -> Corpus:
    """Downloads what the cache lacks and extracts the corpus; the extracted bytes are cached too."""
    cache = cache or cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    key = digest([spec.model_dump(mode="json"), EXTRACTION_VERSION, sys.version_info[:3]])
    ready = [cache / f"{key}.{part}.bin" for part in ("train", "held_out")]
    if not all(path.exists() for path in ready):
        _extract_all(spec, cache, ready)
    train, held_out = (np.fromfile(path, dtype=np.uint8) for path in ready)
    manifest = {
        "bytes": int(train.size),
        "held_out_bytes": int(held_out.size),
        "sha256": hashlib.sha256(train.tobytes()).hexdigest(),
        "extraction_version": EXTRACTION_VERSION,
    }
    return Corpus(train, held_out, manifest)


def _extract_all(spec: CorpusSpec, cache: Path, ready: list[Path]) -> None:
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    seen: set[bytes] = set()
    for source in spec.sources:
        for text in documents(source, cache):
            data = text.strip().encode("utf-8", "ignore").replace(BOUNDARY, b"")
            name = hashlib.sha256(data).digest()
            if len(data) < spec.min_bytes or name in seen:
                continue
            seen.add(name)
            held = int.from_bytes(name[:4], "big") % spec.holdout_every == 0
            parts[held].append((BOUNDARY + data) * (1 if held else source.repeat))
    for path, chunks in zip(ready, parts, strict=True):
        partial = path.with_suffix(".partial")
        partial.write_bytes(b"".join(chunks) + BOUNDARY)
        os.replace(partial, path)


def documents(source: Source, cache: Path) -> Iterator[str]:
    """The texts of a source, in a fixed order."""
    if source.package.lower().startswith(FORBIDDEN):
        raise UserError(f"the corpus names '{source.package}', whose pages are the held-out test: remove it from the recipe")
    for name, data in _files(source, cache):
        if source.extract == "docstrings" and name.endswith(".py"):
            yield prose_of_python(data.decode("utf-8", "ignore"))
        elif source.extract == "html" and name.endswith((".html", ".htm")):
            yield text_of_html(data.decode("utf-8", "ignore"))
        elif source.extract == "readme" and name.endswith("METADATA"):
            yield "\n".join(data.decode("utf-8", "ignore").splitlines()).partition("\n\n")[2]
        elif source.extract == "text":
            yield data.decode("utf-8", "ignore")


def _files(source: Source, cache: Path) -> Iterator[tuple[str, bytes]]:
    if source.kind == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
        for path in sorted(root.rglob("*.py")):
            if not skip & set(path.relative_to(root).parts):
                yield str(path.relative_to(root)), path.read_bytes()
        return
    archive = download(source, cache)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(wheel.namelist()):
                if fnmatch.fnmatch(name, source.include):
                    yield name, wheel.read(name)
        return
    if archive.suffix == ".deb":
        stream = io.BytesIO(subprocess.run(["dpkg-deb", "--fsys-tarfile", archive], check=True, capture_output=True).stdout)
    else:
        stream = io.BytesIO(archive.read_bytes())
    with tarfile.open(fileobj=stream) as tar:
        for member in sorted((m for m in tar.getmembers() if m.isfile()), key=lambda m: m.name):
            if fnmatch.fnmatch(member.name, source.include):
                handle = tar.extractfile(member)
                if handle is not None:
                    yield member.name, handle.read()


def download(source: Source, cache: Path) -> Path:
    """The package's archive in the cache, fetched by its own client when it is not there yet."""
    folder = cache / source.kind / re.sub(r"[^\w.-]", "_", f"{source.package}-{source.version or 'current'}")
    folder.mkdir(parents=True, exist_ok=True)
    pinned = {"npm": "@", "debian": "=", "pypi": "=="}[source.kind]
    name = source.package + (f"{pinned}{source.version}" if source.version else "")
    command = {
        "npm": ["npm", "pack", "--silent", name],
        "debian": ["apt-get", "download", name],
        "pypi": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", name],
    }[source.kind]
    found = [path for path in sorted(folder.iterdir()) if path.suffix in (".whl", ".deb", ".tgz")]
    if not found:
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            detail = (getattr(error, "stderr", b"") or b"").decode("utf-8", "ignore").strip().splitlines()
            why = detail[-1] if detail else str(error)
            raise UserError(f"could not download {source.kind} package '{name}' ({why}): run '{' '.join(command)}'") from error
        found = [path for path in sorted(folder.iterdir()) if path.suffix in (".whl", ".deb", ".tgz")]
    return found[0]


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self.silent = 0

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag in _SILENT:
            self.silent += 1
        elif tag in _BLOCKS:
            self.out.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in _SILENT:
            self.silent = max(0, self.silent - 1)
        elif tag in _BLOCKS:
            self.out.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.out.append(data)


def text_of_html(page: str) -> str:
    """The words of an HTML page: tags, scripts and styles dropped, blocks on lines of their own."""
    parser = _Text()
    parser.feed(page)
    lines = (line.rstrip() for line in html.unescape("".join(parser.out)).splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def prose_of_python(source: str) -> str:
    """The docstrings of a module, then its comments of a line or more."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    parts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 80:
                parts.append(text)
    comments, last = [], -2
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT and len(token.string) > 30:
                text = token.string.lstrip("#: ")
                comments.append(text if token.start[0] == last + 1 else "\n" + text)
                last = token.start[0]
    except (tokenize.TokenError, IndentationError):
        pass
    return "\n\n".join(parts) + "\n" + "\n".join(comments)
