"""Where text comes from: lm-eval's pages and the user's files."""

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halting_bench.benchmarks.text_sources import blocks, docs_benchmark, text_benchmark
from halting_bench.errors import UserError


@pytest.fixture(scope="module")
def docs():
    return docs_benchmark()


def test_the_pages_are_listed_by_path_and_hash_with_the_version_they_come_from(docs):
    source = docs.manifest()["source"]
    assert source["lm_eval"] == importlib.metadata.version("lm-eval")
    root = Path(importlib.metadata.distribution("lm-eval").locate_file("lm_eval/tasks"))
    assert len(source["files"]) == len(docs) > 200
    for page in source["files"]:
        assert hashlib.sha256((root / page["path"]).read_bytes()).hexdigest() == page["sha256"]


def test_the_index_page_and_pages_in_other_scripts_are_left_out(docs):
    names = {page["path"] for page in docs.manifest()["source"]["files"]}
    assert "hellaswag/README.md" in names
    assert not names & {"README.md", "ceval/README.md", "japanese_leaderboard/README.md"}


def test_no_line_occurs_in_two_pages(docs):
    pages = [{line.strip() for line in docs.document(i).decode().splitlines()} - {""} for i in range(len(docs))]
    assert sum(map(len, pages)) == len(set().union(*pages))


def test_reading_the_pages_imports_neither_torch_nor_lm_eval():
    code = (
        "import sys; from halting_bench.benchmarks.text_sources import docs_benchmark; docs_benchmark();"
        "sys.exit(bool({'torch', 'lm_eval'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.text(st.sampled_from("a é\n漢😀"), max_size=300), st.integers(8, 40))
def test_blocks_join_to_the_file_and_each_is_text_of_at_most_the_size(content, size):
    parts = blocks(content.encode(), size)
    assert b"".join(parts) == content.encode()
    for part in parts:
        assert 0 < len(part) <= size
        part.decode("utf-8")


def test_blocks_end_at_line_ends_where_a_line_ends_in_their_second_half():
    assert blocks(b"one\ntwo\nthree\n" + b"x" * 20, 10) == [b"one\ntwo\n", b"three\n", b"x" * 10, b"x" * 10]


def test_a_single_file_is_cut_into_blocks_and_a_folder_into_files(tmp_path):
    (tmp_path / "b.txt").write_text("line\n" * 1000)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("words")
    single, folder = text_benchmark(str(tmp_path / "b.txt")), text_benchmark(str(tmp_path))
    assert len(single) == 3 and b"".join(single.document(i) for i in range(3)) == b"line\n" * 1000
    assert [page["path"] for page in folder.manifest()["source"]["files"]] == ["b.txt", "sub/a.md"]
    assert folder.document(1) == b"words"


def test_the_manifest_depends_on_the_text_and_not_on_where_it_lies(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("same")
    assert text_benchmark(str(tmp_path / "one")).manifest() == text_benchmark(str(tmp_path / "two")).manifest()


def test_hidden_and_empty_files_are_left_out_and_said(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".secret").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    (tmp_path / "again.txt").symlink_to("a.txt")
    toy = text_benchmark(str(tmp_path))
    assert len(toy) == 1
    assert sorted(toy.notes) == [
        "left out .git: hidden",
        "left out .secret: hidden",
        "left out again.txt: a link inside the folder",
        "left out empty.txt: empty",
    ]


@pytest.mark.parametrize("target", ["outside.txt", "outside"])
def test_a_link_out_of_the_folder_is_refused(tmp_path, target):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside.txt").write_text("no")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path / target)
    with pytest.raises(UserError, match="link out of"):
        text_benchmark(str(inside))


def test_a_link_that_points_at_itself_does_not_hang(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "loop").symlink_to("loop")
    assert len(text_benchmark(str(tmp_path))) == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "no text"), (b"PNG\0\1", "binary"), ("naïve".encode("latin-1"), "not UTF-8"), ("words".encode("utf-16"), "binary")],
)
def test_what_is_not_text_is_refused_in_one_line_that_names_the_file(tmp_path, content, complaint):
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=complaint) as caught:
        text_benchmark(str(path))
    assert "file.txt" in str(caught.value) and "\n" not in str(caught.value)


def test_one_bad_file_in_a_folder_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "photo.png").write_bytes(b"\0")
    with pytest.raises(UserError, match=r"photo\.png"):
        text_benchmark(str(tmp_path))


def test_a_missing_path_an_empty_folder_and_a_pipe_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    for name, complaint in [("missing", "does not exist"), ("empty", "no text"), ("pipe", "not a regular file")]:
        with pytest.raises(UserError, match=complaint):
            text_benchmark(str(tmp_path / name))
