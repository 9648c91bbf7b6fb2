"""The routers that ship with the bundled models are those models' own, and are policies by name."""

import json

import pytest
from typer.testing import CliRunner

from halting_bench import catalog
from halting_bench.cli.main import app
from halting_bench.errors import UserError
from halting_bench.halting.routers import RouterPolicy
from halting_bench.plan import build_policy, plan_policy
from halting_bench.sources import find_model_source


@pytest.mark.parametrize("name", catalog.router_names())
def test_a_bundled_router_applies_to_its_model_and_to_no_other(name: str) -> None:
    recipe = catalog.find_policy(name)
    model = find_model_source(name.partition("/")[0])
    spec = model.load().spec
    assert plan_policy(recipe, spec, 16, model.hash()).not_applicable == ""
    assert "was trained on model" in plan_policy(recipe, spec, 16, "another").not_applicable
    assert isinstance(build_policy(recipe, 0.5), RouterPolicy)


def test_they_are_listed_with_how_well_they_tell_their_label() -> None:
    listed = json.loads(CliRunner().invoke(app, ["list", "routers", "--json"]).stdout)
    assert [entry["name"] for entry in listed] == catalog.router_names() != []
    assert all("AUROC" in entry["about"] for entry in listed)


def test_a_misspelt_router_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'huginn-tiny/router-gate-gain'"):
        catalog.find_policy("huginn-tiny/router-gate-gian")
