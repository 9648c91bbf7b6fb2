"""Corpora: extraction, and archives that a cache already holds (no test downloads anything)."""

import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from halting_bench.errors import UserError
from halting_bench.training import corpus
from halting_bench.training.corpus import CorpusSpec, Source, build, documents, prose_of_python, text_of_html


def test_html_keeps_words_and_line_breaks_and_drops_scripts() -> None:
    page = "<html><head><title>no</title></head><h1>A &amp; B</h1><script>x()</script><p>one <b>two</b></p></html>"
    assert text_of_html(page) == "\nA & B\n\none two"


def test_python_keeps_docstrings_and_long_comments_only() -> None:
    long = "A sentence that is long enough to be worth keeping, because it has more than eighty characters in it."
    comment = "# a comment of more than thirty characters, kept\n# and its second line, which is kept as well\n"
    source = f'"""{long}"""\n\nx = 1  # short\n{comment}'
    assert prose_of_python(source).strip() == (
        f"{long}\n\na comment of more than thirty characters, kept\nand its second line, which is kept as well"
    )
    assert prose_of_python("def broken(") == ""


def put_npm(cache: Path, texts: dict[str, str]) -> Source:
    folder = cache / "npm" / "words-1.0.0"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "words-1.0.0.tgz", "w:gz") as tar:
        for name, text in texts.items():
            data = text.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return Source(kind="npm", package="words", version="1.0.0", extract="text", include="package/*.txt")


def test_a_corpus_has_each_document_once_after_a_nul_and_holds_some_out(tmp_path: Path) -> None:
    texts = {f"package/{number}.txt": f"document number {number} " * 20 for number in range(40)}
    source = put_npm(tmp_path, texts | {"package/again.txt": texts["package/0.txt"], "package/skip.md": "no " * 200})
    found = build(CorpusSpec(sources=(source,), holdout_every=4), tmp_path)
    train, held_out = found.train.tobytes(), found.held_out.tobytes()
    parts = [part.decode() for part in (train + held_out).split(b"\0") if part]
    assert sorted(parts) == sorted(text.strip() for text in texts.values())
    assert train.startswith(b"\0") and held_out.count(b"\0") > 2
    assert (found.train[found.starts] == 0).all()
    assert found.manifest["bytes"] == found.train.size


def test_a_corpus_built_twice_is_the_same_and_the_second_time_needs_no_archive(tmp_path: Path) -> None:
    source = put_npm(tmp_path, {"package/a.txt": "some words " * 50})
    spec = CorpusSpec(sources=(source,))
    first = build(spec, tmp_path)
    (tmp_path / "npm" / "words-1.0.0" / "words-1.0.0.tgz").unlink()
    assert np.array_equal(first.train, build(spec, tmp_path).train)


def test_repeat_makes_a_document_count_more_often(tmp_path: Path) -> None:
    source = put_npm(tmp_path, {"package/a.txt": "some words " * 50})
    spec = CorpusSpec(sources=(source.model_copy(update={"repeat": 3}),), holdout_every=10**9)
    assert build(spec, tmp_path).train.tobytes().count(b"\0some words") == 3


def test_a_wheel_gives_its_long_description_whatever_its_line_ends(tmp_path: Path) -> None:
    folder = tmp_path / "pypi" / "thing-2"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "thing-2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing-2.dist-info/METADATA", "Name: thing\r\nVersion: 2\r\n\r\n# Thing\r\n\r\nIt does things.\r\n")
    source = Source(kind="pypi", package="thing", version="2", extract="readme")
    assert list(documents(source, tmp_path)) == ["# Thing\n\nIt does things."]


@pytest.mark.parametrize("package", ["lm-eval", "lm_eval", "LM-Eval"])
def test_the_package_of_the_held_out_pages_is_refused(tmp_path: Path, package: str) -> None:
    with pytest.raises(UserError, match="held-out test"):
        list(documents(Source(kind="pypi", package=package, extract="readme"), tmp_path))


def test_a_failed_download_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("no such client")

    monkeypatch.setattr(corpus.subprocess, "run", refuse)
    with pytest.raises(UserError, match="run 'npm pack --silent words@9'"):
        list(documents(Source(kind="npm", package="words", version="9", extract="text"), tmp_path))
