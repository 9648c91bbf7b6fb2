"""Classes that are not ours: `file.py@ClassName`, or the entry points of installed packages."""

from importlib import metadata
from pathlib import Path

from halting_bench.errors import UserError, unknown_name


def plugin_names(group: str) -> list[str]:
    """Names that installed packages offer in an entry-point group."""
    return sorted(point.name for point in metadata.entry_points(group=group))


def load_class(target: str, group: str) -> type:
    """The class behind `file.py@ClassName`, or behind a name in an entry-point group. Runs that code: it is the user's own.

    Raises:
        UserError: no such file, class or plug-in, or the code raised while it was imported.
    """
    if "@" in target:
        return class_in_file(*target.rpartition("@")[::2])
    for point in metadata.entry_points(group=group, name=target):
        try:
            found = point.load()
        except Exception as error:  # whatever the package raises is for its author to mend, in one line
            raise UserError(f"plug-in '{target}' cannot be imported: {type(error).__name__}: {error}") from error
        return _checked(found, target)
    raise unknown_name(f"plug-in of {group}", target, plugin_names(group))


def class_in_file(file: str, name: str) -> type:
    """A class of a Python file."""
    import importlib.util

    path = Path(file)
    if not path.is_file():
        raise UserError(f"no such file: {file} (write path/to/file.py@{name or 'ClassName'})")
    spec = importlib.util.spec_from_file_location(f"user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is not a Python file: write path/to/file.py@{name or 'ClassName'}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises is the user's to mend, in one line
        raise UserError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    own = [key for key, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__]
    if name not in own:
        raise unknown_name(f"class in {file}", name, own)
    return _checked(vars(module)[name], f"{file}@{name}")


def _checked(found: object, target: str) -> type:
    if not isinstance(found, type):
        raise UserError(f"'{target}' is a {type(found).__name__}, not a class: name a class")
    return found
