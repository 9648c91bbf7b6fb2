"""The documents that REPRODUCTION.md cites are those that the parts write, and each is drawn."""

import shutil
from pathlib import Path

from halting_bench.reproduction.__main__ import PARTS
from halting_bench.reproduction.pictures import PICTURES, draw

REFERENCE = Path(__file__).parents[1] / "results" / "reference"


def test_every_part_has_its_committed_document_and_no_other_is_there() -> None:
    assert {path.stem.removeprefix("reproduction-") for path in REFERENCE.glob("reproduction-*.json")} == set(PARTS)


def test_the_committed_documents_are_drawn(tmp_path: Path) -> None:
    for document in REFERENCE.glob("reproduction-*.json"):
        shutil.copy(document, tmp_path)
    written = draw(tmp_path)
    assert {path.stem.removeprefix("reproduction-") for path in written} == set(PICTURES)
    assert draw(tmp_path / "nothing") == []
