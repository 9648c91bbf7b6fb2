"""Finds what a user names: policy recipes, model cards, benchmarks. An explicit path wins over ./policies and ./models
of our own checkout, which win over the built-in ones. Data only: nothing here imports torch.
"""

import json
import math
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from halting_bench import plugins
from halting_bench.benchmarks.base import Benchmark
from halting_bench.errors import UserError, unknown_name

T = TypeVar("T", bound=BaseModel)

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Names become file and folder names."""

PLUGIN_GROUP = "halting_bench.policies"

_PACKAGE = Path(__file__).parent


def catalog_folder(kind: str) -> Path:
    """The folder of built-in choices: our checkout's when we run from it, else the one inside the wheel."""
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").exists() and (checkout / kind).is_dir():
        return checkout / kind
    return _PACKAGE / "_catalog" / kind


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


Finite = Annotated[float, AfterValidator(_finite)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Grid(Strict):
    """Which thresholds to put in the table. The exact curve covers all of them in any case."""

    absolute: tuple[Finite, ...] = ()
    quantiles: int = Field(default=12, ge=0, le=512)


class RuleSpec(Strict):
    """One signal with its gates; `threshold` only inside a combination, where it is fixed."""

    signal: str
    hits: int = Field(default=1, ge=1)
    min_steps: int = Field(default=1, ge=1)
    every: int = Field(default=1, ge=1)
    threshold: Finite | None = None


class PolicyRecipe(Strict):
    """A policy to sweep: exactly one of `signal`, `python`, `router`, `any_of`, `all_of`.

    `python` names a HaltingPolicy of the user's, `file.py@ClassName` or an entry point of the group
    halting_bench.policies; it is built once for each absolute threshold, with `params` beside it. `router` is a file that
    `train-router` wrote; it applies to the model that it was trained on. `jointly`: of a model of several loops the rule
    watches the first, and a row takes as many steps in each of the others.
    """

    name: str = Field(pattern=NAME)
    source: str
    signal: str | None = None
    python: str | None = None
    router: str | None = None
    any_of: tuple[RuleSpec, ...] = ()
    all_of: tuple[RuleSpec, ...] = ()
    hits: int = Field(default=1, ge=1)
    min_steps: int = Field(default=1, ge=1)
    every: int = Field(default=1, ge=1)
    jointly: bool = False
    grid: Grid = Grid()
    params: dict[str, Any] = {}
    notes: str = ""

    @model_validator(mode="after")
    def _one_rule(self) -> "PolicyRecipe":
        given = [field for field in ("signal", "python", "router", "any_of", "all_of") if getattr(self, field)]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of signal, python, router, any_of, all_of; has {', '.join(given) or 'none'}")
        if self.signal is None and not self.grid.absolute:
            raise ValueError("grid.absolute is empty: this kind of policy is built once for each threshold in it")
        if self.signal is not None and not self.grid.absolute and not self.grid.quantiles:
            raise ValueError("the grid is empty: give absolute thresholds, quantiles, or both")
        free = [rule for rule in (*self.any_of, *self.all_of) if rule.threshold is None]
        if (self.any_of or self.all_of) and len(free) != 1:
            raise ValueError(
                f"exactly one rule of a combination takes the grid's threshold, {len(free)} have none of their own"
            )
        return self


class Card(BaseModel):
    """A model card. Measured tables and prose beside these fields are kept as they are."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(pattern=NAME)
    summary: str
    weights: str = "model.safetensors"
    benchmarks: tuple[str, ...] = ()


def load_yaml(path: Path) -> dict:
    """A YAML mapping. Raises UserError when missing, broken, or something else."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, a YAML file is needed") from None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        place = f", line {where.line + 1}" if where else ""
        raise UserError(f"{path} is not valid YAML{place}: {getattr(error, 'problem', None) or 'not UTF-8 text'}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, a mapping of keys to values is needed")
    return value


def parse(schema: type[T], value: dict, where: str) -> T:
    """Validates a mapping. A misspelt key suggests the nearest and lists the rest."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = _known_keys(schema, first["loc"][:-1])
            raise UserError(f"{where}: {unknown_name('key', str(first['loc'][-1]), known)}") from None
        if first["type"] == "missing":
            raise UserError(f"{where}: '{key}' is missing: add it") from None
        message = first["msg"].removeprefix("Value error, ")
        shown = "" if first["type"] == "value_error" and not key else f", not {first['input']!r}"
        raise UserError(f"{where}: {key + ': ' if key else ''}{message}{shown}") from None


def _known_keys(schema: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        field = schema.model_fields.get(str(part))
        if field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            schema = field.annotation
        elif field is not None:
            return list(RuleSpec.model_fields)
    return list(schema.model_fields)


def policy_names() -> list[str]:
    """Names of the built-in recipes."""
    return sorted(path.stem for path in catalog_folder("policies").glob("*.yaml"))


def router_names() -> list[str]:
    """Routers that ship with the bundled models, as MODEL/ROUTER."""
    return sorted(f"{path.parts[-3]}/{path.stem}" for path in catalog_folder("models").glob("*/routers/*.safetensors"))


def router_file(name: str) -> Path:
    """The file of a bundled router."""
    model, _, router = name.partition("/")
    return catalog_folder("models") / model / "routers" / f"{router}.safetensors"


def router_facts(name: str) -> dict[str, Any]:
    """What a bundled router's file says of it: kind, label, and `report`, how well it told the label."""
    from safetensors import safe_open

    with safe_open(router_file(name), framework="np") as file:
        facts: dict[str, Any] = json.loads(file.metadata()["router"])
    return facts


def plugin_names() -> list[str]:
    """Policies that installed packages offer."""
    return plugins.plugin_names(PLUGIN_GROUP)


ROUTER_GRID = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
"""Probabilities of stopping at which a router is swept."""


def find_policy(name: str) -> PolicyRecipe:
    """A recipe from a name, a YAML file, `file.py@ClassName`, a router's file or name, or an installed plug-in."""
    if name.endswith((".yaml", ".yml")):
        return parse(PolicyRecipe, load_yaml(Path(name)), name)
    if name.endswith(".safetensors"):
        value = {"name": Path(name).stem, "source": name, "router": name, "grid": {"absolute": ROUTER_GRID, "quantiles": 0}}
        return parse(PolicyRecipe, value, name)
    if "@" in name:
        return _python_recipe(name, name.rpartition("@")[2])
    if name in policy_names():
        path = catalog_folder("policies") / f"{name}.yaml"
        return parse(PolicyRecipe, load_yaml(path), str(path))
    if name in plugin_names():
        return _python_recipe(name, name)
    if name in router_names():
        return find_policy(str(router_file(name)))
    raise unknown_name("policy", name, [*policy_names(), *plugin_names(), *router_names()])


def _python_recipe(target: str, name: str) -> PolicyRecipe:
    """A class given on the command line brings its grid as a class attribute `thresholds`."""
    thresholds = getattr(load_policy_class(target), "thresholds", ())
    if not isinstance(thresholds, tuple) or not thresholds:
        raise UserError(f"policy class {target} has no grid: set `thresholds: ClassVar = (...)` on it, or write a recipe YAML")
    value = {"name": name, "source": target, "python": target, "grid": {"absolute": thresholds, "quantiles": 0}}
    return parse(PolicyRecipe, value, target)


def load_policy_class(target: str) -> type:
    """The class behind `file.py@ClassName` or a plug-in's name. Runs that file: it is the user's own code."""
    return plugins.load_class(target, PLUGIN_GROUP)


def code_version(recipe: PolicyRecipe) -> str:
    """What the code or the router behind a policy is now: a sweep must not resume over one that has changed."""
    import hashlib

    target = recipe.router or recipe.python
    if target is None:
        return ""
    if recipe.router or "@" in target:
        return hashlib.sha256(Path(target.rpartition("@")[0] or target).read_bytes()).hexdigest()
    (point,) = metadata.entry_points(group=PLUGIN_GROUP, name=target)
    return f"{point.dist.name} {point.dist.version}" if point.dist else ""


def model_names() -> list[str]:
    """Names of the bundled models."""
    return sorted(path.parent.name for path in catalog_folder("models").glob("*/card.yaml"))


def find_model(name: str) -> tuple[Path, Card]:
    """The folder and card of a bundled model's name or of a folder with config.json; a bare folder gets a bare card."""
    if name in model_names():
        folder = catalog_folder("models") / name
    elif Path(name).is_dir():
        folder = Path(name)
    else:
        error = unknown_name("model", name, model_names())
        raise UserError(f"{error}; or give a folder with config.json and model.safetensors")
    card_file = folder / "card.yaml"
    if not card_file.exists():
        return folder, Card.model_construct(name=folder.resolve().name, summary="a model of the user's")
    card = parse(Card, load_yaml(card_file), str(card_file))
    weights = (folder / card.weights).resolve()
    if not weights.is_relative_to(folder.resolve()):
        raise UserError(f"{card_file}: weights '{card.weights}' lie outside the model's folder: put the file into it")
    return folder, card


BENCHMARKS = {
    "shell": "a ball under five cups, where is it after each swap (procedural, by number of swaps)",
    "pancake": "a marked pancake in a stack of six, where is it after each flip (procedural, by number of flips)",
    "s3": "running product in the group of permutations of three things (procedural, by number of factors)",
    "hop": "value of a variable defined through others (procedural, by depth of the definition)",
    "add": "digits of a sum, least significant first (procedural, by carry chain)",
    "roots": "root of a node in a forest given as pointers, for encoders (procedural, by depth of the node)",
    "expressions": "value of nested operations on digits, for encoders (procedural, by height)",
    "docs": "bits per byte on the English task pages inside the installed lm-eval",
    "masked": "bits per byte at hidden runs of the same pages, for encoders (by length of the run)",
    "text:PATH": "bits per byte on a UTF-8 file or folder of your own",
    "lm-eval:TASK": "any task, group or YAML of lm-eval, scored by lm-eval itself",
}
"""Built-in benchmarks and what they ask."""


def find_benchmark(name: str) -> Benchmark:
    """A benchmark from its name, or `text:PATH`."""
    from halting_bench.benchmarks.tasks import TASKS
    from halting_bench.benchmarks.text_sources import PAGE_BENCHMARKS, text_benchmark

    if name.startswith("text:"):
        return text_benchmark(name.removeprefix("text:"))
    if name in PAGE_BENCHMARKS:
        return PAGE_BENCHMARKS[name]()
    if name in TASKS:
        return TASKS[name]()
    raise unknown_name("benchmark", name, [*TASKS, *PAGE_BENCHMARKS, "text:PATH", "lm-eval:TASK"])


def show(value: BaseModel) -> dict:
    """A JSON-able form of a recipe, card or config."""
    loaded: dict = json.loads(value.model_dump_json())
    return loaded
