from halting_bench import load_run, sweep
from tests.toy_sweeps import settings


def test_a_run_has_the_points_of_the_run_it_is_like_and_those_that_rules_name(tmp_path):
    few = {"policies": ("latent-diff", "kl"), "limit": 8}
    base = load_run(sweep(settings(tmp_path, **few), out=tmp_path / "base"))
    rules = tmp_path / "gate.yaml"
    rules.write_text("rules: [{quantity: quality, margin: 1, policy: kl, threshold: 0.0625}]")
    asked = settings(tmp_path, **few, seeds=(3,), like=str(base.path), rules=str(rules))
    head = load_run(sweep(asked, out=tmp_path / "head"))
    kept = set(zip(head.per_document["policy"], head.per_document["threshold"], strict=True))
    ruled = base.per_document[base.per_document["policy"].isin(["latent-diff", "kl"])]
    assert set(zip(ruled["policy"], ruled["threshold"], strict=True)) <= kept
    assert ("kl", 0.0625) in kept
