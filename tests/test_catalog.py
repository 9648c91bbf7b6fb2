"""Finding what a user names, and one clear line for each mistake: what, the value, and what to type."""

import json
from pathlib import Path

import pytest
import yaml

from halting_bench import catalog
from halting_bench.catalog import (
    PolicyRecipe,
    find_benchmark,
    find_model,
    find_policy,
    load_policy_class,
    load_yaml,
    parse,
    show,
)
from halting_bench.errors import UserError
from halting_bench.halting.signals import SIGNALS
from halting_bench.plan import plan_policy
from halting_bench.sweep_config import SweepConfig, read_config


def message(error: pytest.ExceptionInfo[UserError]) -> str:
    """The one line of a user's mistake."""
    text = str(error.value)
    assert "\n" not in text
    return text


RECIPES = catalog.policy_names()


@pytest.mark.parametrize("name", RECIPES)
def test_every_built_in_recipe_is_valid_and_named_after_its_file(name: str):
    recipe = find_policy(name)
    assert recipe.name == name
    assert recipe.source
    for signal in [recipe.signal] if recipe.signal else [rule.signal for rule in (*recipe.any_of, *recipe.all_of)]:
        assert signal in SIGNALS


def test_every_signal_has_a_recipe():
    recipes = [find_policy(name) for name in RECIPES]
    assert {recipe.signal for recipe in recipes} >= SIGNALS.keys()


def test_shown_recipes_and_configs_come_back_as_they_were():
    for name in RECIPES:
        assert PolicyRecipe.model_validate(json.loads(json.dumps(show(find_policy(name))))) == find_policy(name)
    config = SweepConfig(limit=5, seeds=(1, 2))
    assert SweepConfig.model_validate(show(config)) == config


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


GOOD = {"name": "mine", "source": "me", "signal": "kl", "grid": {"absolute": [0.1]}}


def recipe_file(folder: Path, **changes: object) -> str:
    value = {key: v for key, v in (GOOD | changes).items() if v is not None}
    return write(folder / "mine.yaml", yaml.safe_dump(value))


def test_a_recipe_of_the_users_is_found_by_its_path(tmp_path: Path):
    assert find_policy(recipe_file(tmp_path)).name == "mine"


BAD_RECIPES = [
    ({"signl": "kl", "signal": None}, "unknown key 'signl': did you mean 'signal'? known: "),
    ({"grid": {"absolut": [0.1]}}, "unknown key 'absolut': did you mean 'absolute'? known: absolute, quantiles"),
    ({"grid": {"absolute": [float("nan")]}}, "grid.absolute.0: must be a finite number, not nan"),
    ({"grid": {"absolute": [float("inf")]}}, "grid.absolute.0: must be a finite number, not inf"),
    ({"grid": {"absolute": ["small"]}}, "grid.absolute.0: Input should be a valid number"),
    ({"grid": {"absolute": ["small"]}}, "not 'small'"),
    ({"grid": {"absolute": [], "quantiles": 0}}, "the grid is empty: give absolute thresholds, quantiles, or both"),
    ({"grid": {"quantiles": -1}}, "grid.quantiles: Input should be greater than or equal to 0, not -1"),
    ({"hits": 0}, "hits: Input should be greater than or equal to 1, not 0"),
    ({"every": 0}, "every: Input should be greater than or equal to 1, not 0"),
    ({"min_steps": -2}, "min_steps: Input should be greater than or equal to 1, not -2"),
    ({"signal": None}, "needs exactly one of signal, python, router, any_of, all_of; has none"),
    ({"python": "mine.py@P"}, "needs exactly one of signal, python, router, any_of, all_of; has signal, python"),
    (
        {"signal": None, "any_of": [{"signal": "kl"}, {"signal": "entropy"}]},
        "exactly one rule of a combination takes the grid's",
    ),
    ({"signal": None, "any_of": [{"signal": "kl", "treshold": 1}]}, "unknown key 'treshold': did you mean 'threshold'?"),
    ({"source": None}, "'source' is missing: add it"),
    ({"name": "../mine"}, "name: String should match pattern"),
    ({"name": ""}, "name: String should match pattern"),
]


@pytest.mark.parametrize(("changes", "told"), BAD_RECIPES)
def test_a_wrong_recipe_is_told_by_its_file_its_key_and_its_value(tmp_path: Path, changes: dict, told: str):
    with pytest.raises(UserError) as error:
        find_policy(recipe_file(tmp_path, **changes))
    assert told in message(error)
    assert "mine.yaml" in message(error)


BAD_FILES = [
    ("a: [1", "is not valid YAML, line 1: "),
    ("a: 1\nb: {", "is not valid YAML, line 2: "),
    ("- a\n- b", "holds a list, a mapping of keys to values is needed"),
    ("", "holds a NoneType, a mapping of keys to values is needed"),
    ("kl", "holds a str, a mapping of keys to values is needed"),
    ("a: !!python/object/apply:os.system ['true']", "is not valid YAML"),
]


@pytest.mark.parametrize(("text", "told"), BAD_FILES)
def test_broken_yaml_is_told_with_its_line(tmp_path: Path, text: str, told: str):
    with pytest.raises(UserError) as error:
        load_yaml(Path(write(tmp_path / "x.yaml", text)))
    assert told in message(error)


def test_yaml_that_is_missing_a_folder_or_not_text_says_so(tmp_path: Path):
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    for path, told in (
        (tmp_path / "no.yaml", "no such file"),
        (tmp_path, "is a folder"),
        (tmp_path / "latin.yaml", "not UTF-8 text"),
    ):
        with pytest.raises(UserError) as error:
            load_yaml(path)
        assert told in message(error)


MISSPELT = [
    (find_policy, "latent-dif", "unknown policy 'latent-dif': did you mean 'latent-diff'? known: acceleration, "),
    (find_policy, "zzz", "unknown policy 'zzz': known: acceleration, "),
    (find_benchmark, "shel", "unknown benchmark 'shel': did you mean 'shell'? known: "),
    (find_model, "huginn-tinny", "unknown model 'huginn-tinny': "),
    (find_policy, "no.yaml", "no such file: no.yaml"),
    (find_policy, "no.py@P", "no such file: no.py (write path/to/file.py@P)"),
    (load_policy_class, "no-such-plugin", "unknown plug-in of halting_bench.policies 'no-such-plugin'"),
]


@pytest.mark.parametrize(("find", "name", "told"), MISSPELT)
def test_a_misspelt_name_gets_the_nearest_and_the_rest(find, name: str, told: str):
    with pytest.raises(UserError) as error:
        find(name)
    assert message(error).startswith(told)


def spec(**changes: object):
    import dataclasses

    from halting_bench.architectures.toy import toy_model

    return dataclasses.replace(toy_model().spec, **changes)


def test_an_unknown_signal_suggests_the_nearest(tmp_path: Path):
    with pytest.raises(UserError, match=r"unknown signal in policy 'mine' 'kll': did you mean 'kl'\? known: acceleration, "):
        plan_policy(find_policy(recipe_file(tmp_path, signal="kll")), spec(), 8)


@pytest.mark.parametrize(
    "changes",
    [
        {"grid": {"absolute": [0.1, -0.1]}},
        {"signal": None, "all_of": [{"signal": "kl"}, {"signal": "entropy", "threshold": -0.1}]},
    ],
)
def test_a_negative_threshold_of_a_score_that_is_never_negative_is_refused(tmp_path: Path, changes: dict):
    with pytest.raises(UserError) as error:
        plan_policy(find_policy(recipe_file(tmp_path, **changes)), spec(), 8)
    assert "policy 'mine': threshold -0.1 is negative" in message(error)


APPLIES = [
    ({"signal": "kl"}, 3, ""),
    ({"signal": "kl"}, 2, "it can fire at step 2 at the earliest, and the model runs 2"),
    ({"signal": "acceleration", "hits": 2}, 3, "it can fire at step 3 at the earliest, and the model runs 3"),
    ({"signal": "entropy", "min_steps": 8}, 8, "it can fire at step 8 at the earliest, and the model runs 8"),
    ({"signal": "entropy", "every": 4, "hits": 2}, 8, "it can fire at step 8 at the earliest, and the model runs 8"),
    ({"signal": "entropy", "every": 3, "min_steps": 4}, 7, ""),
    ({"signal": "gate-cdf"}, 8, "the model has no halting gate"),
    ({"signal": None, "any_of": [{"signal": "entropy"}, {"signal": "kl", "threshold": 1.0, "hits": 4}]}, 3, ""),
    (
        {"signal": None, "all_of": [{"signal": "entropy"}, {"signal": "kl", "threshold": 1.0, "hits": 4}]},
        5,
        "it can fire at step 5 at the earliest, and the model runs 5",
    ),
]


@pytest.mark.parametrize(("changes", "steps", "reason"), APPLIES)
def test_a_rule_that_cannot_fire_before_the_last_step_does_not_apply(tmp_path: Path, changes: dict, steps: int, reason: str):
    assert plan_policy(find_policy(recipe_file(tmp_path, **changes)), spec(), steps).not_applicable == reason


BAD_SETTINGS = [
    ("limit=0", "number of documents"),
    ("limit=-3", "-3"),
    ("limit=1", "2 or more"),
    ("limit=some", "'some'"),
    ("limit=1.5", "1.5"),
    ("max_steps=0", "max_steps"),
    ("device=gpu", "'auto', 'cpu' or 'cuda', not 'gpu'"),
    ("dtype=float16", "not 'float16'"),
    ("seeds=[]", "seeds"),
    ("seeds=[-1]", "-1"),
    ("models=[]", "models"),
    ("calibration_fraction=1", "less than 1, not 1"),
    ("batch_tokens=0", "batch_tokens: Input should be greater than or equal to 1, not 0"),
    ("sedes=[1]", "unknown key 'sedes': did you mean 'seeds'? known: "),
    ("latency.enable=false", "unknown key 'enable': did you mean 'enabled'? known: "),
    ("limit", "--set limit: write key=value, for example --set limit=64"),
    ("limit=[", "--set limit=[: '[' is not a YAML value"),
    ("limit.a=3", "limit"),
]


@pytest.mark.parametrize(("setting", "told"), BAD_SETTINGS)
def test_a_wrong_setting_is_told_by_its_key_and_value(setting: str, told: str):
    with pytest.raises(UserError) as error:
        read_config(None, {}, [setting])
    assert told in message(error)
    assert "literal[" not in message(error)
    assert "function-after" not in message(error)


def test_a_setting_inside_a_value_is_refused():
    with pytest.raises(UserError) as error:
        read_config(None, {"limit": 5}, ["limit.a=3"])
    assert "'limit' holds a value, not a group of keys" in message(error)


def test_flags_win_over_the_file_and_set_over_flags(tmp_path: Path):
    file = Path(write(tmp_path / "sweep.yaml", "limit: 8\nseeds: [1, 2]\nlatency: {batch_rows: 2}\n"))
    config = read_config(file, {"limit": 9, "device": None}, ["seeds=[3]", "latency.enabled=false", "benchmarks=[shell]"])
    assert (config.limit, config.seeds, config.device, config.benchmarks) == (9, (3,), "auto", ("shell",))
    assert (config.latency.batch_rows, config.latency.enabled) == (2, False)
    with pytest.raises(UserError, match=r"sweep\.yaml"):
        read_config(Path(write(tmp_path / "sweep.yaml", "limits: 8")), {}, [])


def test_a_folder_without_a_card_is_a_model_named_after_it(tmp_path: Path):
    folder, card = find_model(str(tmp_path))
    assert folder == tmp_path
    assert card.name == tmp_path.name


BAD_CARDS = [
    ({"weights": "../other/model.safetensors"}, "weights '../other/model.safetensors' lie outside the model's folder"),
    ({"weights": "/etc/hostname"}, "weights '/etc/hostname' lie outside the model's folder"),
    ({"name": "../../other"}, "name: String should match pattern"),
    ({"summary": None}, "'summary' is missing: add it"),
]


@pytest.mark.parametrize(("changes", "told"), BAD_CARDS)
def test_a_card_that_points_outside_or_lacks_a_field_is_refused(tmp_path: Path, changes: dict, told: str):
    value = {"name": "mine", "summary": "a model"} | changes
    write(tmp_path / "card.yaml", yaml.safe_dump({k: v for k, v in value.items() if v is not None}))
    with pytest.raises(UserError) as error:
        find_model(str(tmp_path))
    assert told in message(error)


def test_a_card_keeps_what_else_it_says(tmp_path: Path):
    write(tmp_path / "card.yaml", "name: mine\nsummary: a model\nlicense: Apache-2.0\n")
    assert find_model(str(tmp_path))[1].model_dump()["license"] == "Apache-2.0"


CLASS = "from halting_bench import HaltingPolicy\nclass Mine(HaltingPolicy):\n    {body}\n"
BAD_CLASSES = [
    ("import nothing_of_that_name", "Mine", "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_that_name'"),
    ("def broken(:", "Mine", "cannot be imported: SyntaxError: "),
    ("1 / 0", "Mine", "cannot be imported: ZeroDivisionError: division by zero"),
    (CLASS.format(body="thresholds = (1.0,)"), "Mien", "unknown class in "),
    (CLASS.format(body="thresholds = (1.0,)"), "Mien", "did you mean 'Mine'?"),
    (CLASS.format(body="pass"), "Mine", "has no grid: set `thresholds: ClassVar = (...)` on it, or write a recipe YAML"),
    (CLASS.format(body="thresholds = (float('nan'),)"), "Mine", "must be a finite number, not nan"),
    (CLASS.format(body="thresholds = ('x',)"), "Mine", "not 'x'"),
]


@pytest.mark.parametrize(("text", "name", "told"), BAD_CLASSES)
def test_a_class_of_the_users_that_cannot_be_used_says_why(tmp_path: Path, text: str, name: str, told: str):
    path = write(tmp_path / "mine.py", text)
    with pytest.raises(UserError) as error:
        find_policy(f"{path}@{name}")
    assert told in message(error)


UNBUILDABLE = [
    ("class Mine:\n    thresholds = (1.0,)\n    def __init__(self, threshold): pass\n", "is no HaltingPolicy: derive it from"),
    ("class Mine:\n    thresholds = (1.0,)\n", "cannot build "),
    (CLASS.format(body="thresholds = (1.0,)\n    def __init__(self, threshold): 1 / 0"), "cannot build "),
    (CLASS.format(body="thresholds = (1.0,)"), "cannot build "),  # abstract methods are missing
]


@pytest.mark.parametrize(("text", "told"), UNBUILDABLE)
def test_a_class_that_cannot_be_built_or_is_no_policy_says_so(tmp_path: Path, text: str, told: str):
    path = write(tmp_path / "mine.py", text)
    with pytest.raises(UserError) as error:
        plan_policy(find_policy(f"{path}@Mine"), spec(), 8)
    assert told in message(error)


def test_parse_tells_the_whole_path_of_a_wrong_leaf():
    with pytest.raises(UserError, match=r"^here: any_of\.0\.hits: Input should be greater than or equal to 1, not 0$"):
        parse(PolicyRecipe, GOOD | {"signal": None, "any_of": [{"signal": "kl", "hits": 0}]}, "here")


def test_every_procedural_task_is_listed_and_every_listed_name_is_found():
    from halting_bench.benchmarks.tasks import TASKS
    from halting_bench.benchmarks.text_sources import PAGE_BENCHMARKS

    listed = {name for name in catalog.BENCHMARKS if ":" not in name}
    assert listed == {*TASKS, *PAGE_BENCHMARKS}
    assert all(catalog.find_benchmark(name).name == name for name in listed)
