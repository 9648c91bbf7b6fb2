"""Files of a checkpoint folder: checked before they are opened."""

import json
from pathlib import Path

from halting_bench.errors import UserError


def checked_file(folder: Path, name: str) -> Path:
    """A file of the folder: there, not empty, not a link out of it.

    The hub's cache is made of links from `snapshots/<revision>/` to `blobs/` of the same repository; those are followed.
    """
    path = folder / name
    root = folder.resolve()
    inside = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if Path(name).name != name:
        raise UserError(f"{folder}: the index names '{name}', which is not a plain file name: download the index again")
    target = path.resolve()
    if not any(target.is_relative_to(place) for place in inside):
        raise UserError(f"{path} is a link out of its folder (to {target}): copy the file itself there")
    if not target.is_file():
        raise UserError(f"no {name} in {folder}: download it again")
    if target.stat().st_size == 0:
        raise UserError(f"{path} is empty (0 bytes): download it again")
    return path


def read_json(path: Path) -> dict:
    """A JSON object from a file. Raises UserError when it is anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): mend it or copy it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object: copy it again")
    return value
