"""Recipes: what is accepted, and the one line that a mistake becomes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from halting_bench.errors import UserError
from halting_bench.training.recipe import load_recipe


def test_a_small_recipe_is_accepted_and_its_defaults_are_resolved(write: Callable[..., Path]) -> None:
    recipe = load_recipe(write())
    assert recipe.depth.mean == 8 and recipe.depth.backprop == 4 and recipe.mixture[0].weight == 1


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[2].glob("models/*/recipe.yaml")), ids=lambda path: path.parent.name
)
def test_every_bundled_recipe_is_valid_and_named_after_its_folder(path: Path) -> None:
    assert load_recipe(path).name == path.parent.name


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stepz": 3}, "stepz: Extra inputs are not permitted (got 3)"),
        ({"steps": 0}, "steps: Input should be greater than 0 (got 0)"),
        ({"depth": {"meen": 3}}, "depth.meen"),
        ({"precision": "float8"}, "precision"),
        ({"mixture": []}, "mixture"),
        ({"mixture": [{"task": "text"}]}, "the mixture has 'text' but there is no corpus: add 'corpus: {sources: [...]}'"),
        ({"mixture": [{"task": "masked"}]}, "the mixture has 'masked' but there is no corpus: add"),
        ({"mixture": [{"task": "maskd"}]}, "did you mean 'masked'"),
        ({"mixture": [{"task": "shel"}]}, "did you mean 'shell'"),
        ({"family": "huginn"}, "did you mean 'huginn_raven'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_place(write: Callable[..., Path], changes: dict, told: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(write(**changes))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_a_broken_and_an_empty_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read recipe"):
        load_recipe(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(UserError, match="is not YAML") as caught:
        load_recipe(broken)
    assert "\n" not in str(caught.value)
    broken.write_text("")
    with pytest.raises(UserError, match="not a mapping"):
        load_recipe(broken)
