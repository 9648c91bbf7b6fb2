"""Imports run one way: an AST walk over the package proves what the layout promises."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import halting_bench

PACKAGE = Path(str(halting_bench.__file__)).parent
MODULES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}

HEAVY = ("torch", "transformers", "lm_eval", "matplotlib", "scipy", "tokenizers", "huggingface_hub")
LIGHT_ROOMS = ("records", "errors", "store", "catalog", "analysis", "reporting")
"""What `report` and `list` are made of: never torch, not even later."""
LIGHT_FILES = ("engine.replay", "engine.curve", "engine.points", "engine.controls")

BELOW = {
    "errors": set(),
    "records": set(),
    "halting": {"records", "errors"},
    "plugins": {"errors"},
    "architectures": {"records", "errors", "plugins"},
    "benchmarks": {"records", "errors", "architectures"},
    "store": {"records", "errors"},
    "analysis": {"records", "errors", "store"},
    "reporting": {"records", "errors", "store", "analysis"},
    "engine": {"records", "errors", "store", "halting", "architectures", "benchmarks"},
    "timing": {"records", "errors", "store", "halting", "architectures", "benchmarks", "engine"},
}
"""Room -> the rooms it may import from. What is not listed (plan, unit, sweep, ...) stands above all of these."""


def statements(path: Path) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import of a file that runs, and whether it runs when the file is imported."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child, at_import
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue  # for the type checker only
            else:
                yield from walk(child, at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


@cache
def imported(path: Path, *, only_at_import: bool = False) -> set[str]:
    found = set()
    for statement, at_import in statements(path):
        if only_at_import and not at_import:
            continue
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        else:
            assert statement.level == 0, f"{path}: imports are absolute"
            found.add(str(statement.module))
            found |= {f"{statement.module}.{alias.name}" for alias in statement.names}
    return found


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def rooms_of(path: Path) -> set[str]:
    """Rooms of the package that a file uses."""
    return {room(name) for name in imported(path) if name.startswith("halting_bench.")} - {""}


@pytest.mark.parametrize("name", sorted(BELOW))
def test_a_room_imports_only_from_the_rooms_below_it(name: str):
    files = {module: path for module, path in MODULES.items() if room(module) == name}
    assert files
    for module, path in files.items():
        assert rooms_of(path) <= BELOW[name] | {name}, module


def test_nothing_imports_the_command_line():
    for module, path in MODULES.items():
        if room(module) not in ("cli", "__main__"):
            assert "cli" not in rooms_of(path), module


def test_what_a_report_needs_never_imports_torch_or_what_does():
    above = {"halting", "architectures", "engine", "timing", "training", "plan", "unit", "sweep", "jobs", "tabulation"}
    for module, path in MODULES.items():
        if room(module) in LIGHT_ROOMS:
            names = {name.partition(".")[0] for name in imported(path)}
            assert not names & {"torch", "transformers", "lm_eval"}, module
        if room(module) in LIGHT_ROOMS[:3] + LIGHT_ROOMS[4:]:
            assert not rooms_of(path) & above, module
        if module.removeprefix("halting_bench.") in LIGHT_FILES:
            assert "torch" not in imported(path), module


def test_a_catalog_imports_nothing_heavy_at_import():
    names = imported(MODULES["halting_bench.catalog"], only_at_import=True)
    assert not {room(name) for name in names if name.startswith("halting_bench")} & {
        "halting",
        "architectures",
        "engine",
        "timing",
    }


def test_heavy_packages_are_imported_inside_the_functions_that_need_them():
    for module, path in MODULES.items():
        names = {name.partition(".")[0] for name in imported(path, only_at_import=True)}
        assert not names & (set(HEAVY) - {"torch"}), module


def test_only_the_bridge_imports_lm_eval():
    users = {module for module, path in MODULES.items() if any(name.partition(".")[0] == "lm_eval" for name in imported(path))}
    assert all(".benchmarks.lm_eval" in module for module in users), users


def test_benchmarks_never_call_the_engine():
    for module, path in MODULES.items():
        if room(module) == "benchmarks":
            assert "engine" not in rooms_of(path), module


def test_there_is_no_circle_at_import():
    graph = {
        module: {name for name in imported(path, only_at_import=True) if name in MODULES} - {module}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_no_file_of_the_package_unpickles_or_asks_hasattr():
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        assert not names & {"pickle.load", "pickle.loads", "hasattr", "eval", "exec"}, module
        for call in calls:
            if ast.unparse(call.func) == "torch.load":
                assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords), module
            if ast.unparse(call.func) == "np.load":
                assert any(k.arg == "allow_pickle" and ast.unparse(k.value) == "False" for k in call.keywords), module


LIGHT_IMPORTS = (
    "halting_bench, halting_bench.catalog, halting_bench.store, halting_bench.reporting.tables, halting_bench.cli.main"
)


def test_help_list_and_report_start_without_torch():
    program = f"import sys, {LIGHT_IMPORTS}; print(sorted({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
