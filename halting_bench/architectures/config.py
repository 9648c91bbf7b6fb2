"""Reads config.json, and its keys with the type and the range they must have, before anything is allocated."""

from collections.abc import Mapping
from pathlib import Path

from halting_bench.architectures.files import checked_file, read_json
from halting_bench.errors import UserError

Config = Mapping[str, object]

MAX_LAYERS = 10_000
"""No checkpoint has more layers than this, and building even empty modules for 10^9 would take the machine's memory."""


def read_config(folder: Path) -> dict:
    """The parsed config.json. Raises UserError when it is missing, a link out of the folder, or not a JSON object."""
    if not folder.is_dir():
        raise UserError(f"no model folder {folder}: give a folder with config.json, a model's name or a hub id")
    if not (folder / "config.json").exists() and not (folder / "config.json").is_symlink():
        raise UserError(f"no config.json in {folder}: a model folder holds config.json and model.safetensors")
    return read_json(checked_file(folder, "config.json"))


def need(config: Config, family: str, keys: tuple[str, ...]) -> None:
    """Raises UserError unless every key is there."""
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise UserError(f"config.json of a {family} model lacks {', '.join(missing)}: add them from the public config")


def whole(config: Config, key: str, default: int | None = None, *, least: int = 1) -> int:
    """An integer of at least `least`; `default` when the key is absent or null. Raises UserError otherwise."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"config.json: {key} is {value!r}: it must be a whole number of at least {least}")
    return value


def real(config: Config, key: str, default: float | None = None) -> float:
    """A positive finite number; `default` when the key is absent or null. Raises UserError otherwise."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"config.json: {key} is {value!r}: it must be a positive number")
    return float(value)


def layer_count(config: Config, key: str, *, least: int = 1) -> int:
    """A number of layers that can be built. Raises UserError otherwise, before anything is."""
    count = whole(config, key, least=least)
    if count > MAX_LAYERS:
        raise UserError(f"config.json: {key} is {count}: more than {MAX_LAYERS} layers are refused; check the file")
    return count


def refuse(config: Config, family: str, key: str, *supported: object) -> None:
    """Raises UserError when a key that changes the computation has a value this loader does not implement."""
    if key in config and config[key] not in supported:
        raise UserError(
            f"config.json: {key} is {config[key]!r}: the {family} loader knows only {', '.join(map(repr, supported))}; "
            "write your own class (FILE.py@CLASS)"
        )
