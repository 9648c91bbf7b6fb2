import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from halting_bench.analysis.comparison import Difference, gap_share, sign_test
from halting_bench.analysis.gate import Verdict, exit_code, gate, judge
from halting_bench.analysis.pairing import Point, pair
from halting_bench.analysis.rules import GateRules
from halting_bench.baseline import update_baseline
from halting_bench.catalog import load_yaml, parse
from halting_bench.errors import UserError
from halting_bench.store import load_run
from halting_bench.timing.clock import FakeClock
from halting_bench.timing.protocol import Protocol, TimedPoint, measure
from tests.analysis.simulated_run import Simulated, write_run

WORLD = Simulated(documents=80, tokens=25)
QUANTITIES = {
    "quality": 0.02,
    "mean_depth": 0.1,
    "depth_at_equal_quality": 0.3,
    "quality_at_equal_depth": 0.02,
    "flops": "3%",
    "hypervolume": "5%",
    "gap_share": 0.1,
}
AT_THRESHOLD = {"quality", "mean_depth", "flops"}


def rules(*quantities, **changes):
    asked = [{"quantity": name, "margin": QUANTITIES[name], "policy": "latent-diff", **changes} for name in quantities]
    return GateRules.model_validate({"rules": asked})


def verdicts(judgements):
    return {each.rule.quantity.value: each.verdict for each in judgements}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("base"), WORLD)


@pytest.fixture
def run_of(tmp_path):
    return lambda **changes: write_run(tmp_path / "head", replace(WORLD, **changes))


@pytest.mark.parametrize(
    ("interval", "worse", "verdict"),
    [
        ((-0.5, 0.5), "up", Verdict.PASS),
        ((-9.0, 1.0), "up", Verdict.PASS),
        ((1.1, 2.0), "up", Verdict.FAIL),
        ((0.5, 1.5), "up", Verdict.INCONCLUSIVE),
        ((-2.0, -1.1), "down", Verdict.FAIL),
        ((-1.0, 9.0), "down", Verdict.PASS),
        ((-2.0, -1.1), "both", Verdict.FAIL),
        ((-2.0, 0.0), "both", Verdict.INCONCLUSIVE),
        ((-1.0, 1.0), "both", Verdict.PASS),
        ((math.nan, math.nan), "up", Verdict.INCONCLUSIVE),
        ((math.inf, math.inf), "up", Verdict.FAIL),
    ],
)
def test_the_interval_decides_not_the_estimate(interval, worse, verdict):
    assert judge(Difference(0, 0, 0, *interval), 1.0, worse)[0] is verdict


def test_the_closed_share_of_the_gap_is_read_off_both_curves_at_the_policys_own_depth(base):
    aligned = pair(base, base, "demo", "demo", "docs")
    side, tokens = aligned.base, aligned.base.tokens.sum()

    def curve(name):
        rows = side.of_policy(name)
        depth, quality = side.depth[rows].sum(axis=1) / tokens, side.quality[rows].sum(axis=1) / tokens
        order = np.argsort(depth)
        return depth[order], quality[order]

    own = side.row(Point("latent-diff", side.iso["latent-diff"]))
    depth, quality = side.depth[own].sum() / tokens, side.quality[own].sum() / tokens
    uniform, oracle = (np.interp(depth, *curve(name)) for name in ("fixed", "oracle-loss"))
    found = gap_share(aligned, "latent-diff")
    assert found.base == pytest.approx((uniform - quality) / (uniform - oracle))
    assert (found.value, found.lo, found.hi) == (0.0, 0.0, 0.0)


def test_a_run_against_itself_passes_every_rule(base):
    judged = gate(base, base, rules(*QUANTITIES))
    assert verdicts(judged) == dict.fromkeys(QUANTITIES, Verdict.PASS)
    assert exit_code(judged) == 0


def test_two_runs_of_one_commit_never_fail_and_nearly_always_pass(base, tmp_path):
    quantities = [name for name in QUANTITIES if name not in AT_THRESHOLD]
    found = []
    for seed in range(1, 6):
        head = write_run(tmp_path / str(seed), replace(WORLD, noise=seed))
        found += [each.verdict for each in gate(head, base, rules(*quantities))]
    assert Verdict.FAIL not in found
    assert found.count(Verdict.PASS) >= 0.95 * len(found)


def test_noise_alone_never_fails_whatever_the_number_of_documents():
    """The verdicts on simulated paired differences of zero mean: many seeds, intervals as the gate makes them."""
    from halting_bench.analysis.statistics import paired_difference

    rng, counts = np.random.default_rng(0), np.full(60, 10)
    found = []
    for _ in range(1000):
        head = rng.normal(0, 0.3, 60)
        value, lo, hi = paired_difference(head, np.zeros(60), counts)
        found.append(judge(Difference(0, value, value, lo, hi), 0.02, "both")[0])
    assert found.count(Verdict.FAIL) == 0
    assert found.count(Verdict.PASS) >= 950


def test_a_weakened_checkpoint_fails_on_quality(base, run_of):
    judged = verdicts(
        gate(run_of(weaker=0.1, model_hash="cccc"), base, rules("quality", "quality_at_equal_depth", other_model=True))
    )
    assert set(judged.values()) == {Verdict.FAIL}


def test_another_checkpoint_is_incomparable_unless_that_is_the_purpose(base, run_of):
    judged = gate(run_of(model_hash="cccc"), base, rules("hypervolume"))
    assert judged[0].verdict is Verdict.INCOMPARABLE
    assert exit_code(judged) == 4


def test_a_policy_that_fires_early_fails_on_depth_at_its_threshold(base, run_of):
    head = run_of(early=1)
    judged = gate(head, base, rules("quality", "mean_depth"))
    assert verdicts(judged) == dict.fromkeys(("quality", "mean_depth"), Verdict.INCOMPLETE)
    threshold = base.iso.set_index("policy").loc["latent-diff", "threshold"]
    own = head.iso.set_index("policy").loc["latent-diff", "threshold"]
    named = head.per_document.assign(threshold=head.per_document["threshold"].replace(own, threshold))
    early = head.per_document[(head.per_document["policy"] == "latent-diff") & (head.per_document["threshold"] == own)]
    steps = early["depth_sum"] - early["n_tokens"]
    named.loc[early.index, "depth_sum"] = steps
    judged = gate(replace(head, per_document=named), base, rules("mean_depth"))
    assert judged[0].verdict is Verdict.FAIL
    assert judged[0].difference.hi < -0.1


def test_what_a_run_lacks_is_incomplete_and_outranks_a_regression(base, run_of):
    head = run_of(weaker=0.1)
    without = replace(head, per_document=head.per_document[head.per_document["policy"] != "kl"])
    both = GateRules(rules=rules("quality").rules + rules("quality", policy="kl").rules)
    judged = gate(without, base, both)
    assert [each.verdict for each in judged] == [Verdict.FAIL, Verdict.INCOMPLETE]
    assert exit_code(judged) == 5


def test_a_rule_that_matches_nothing_is_an_error(base):
    with pytest.raises(UserError, match="matches nothing"):
        gate(base, base, rules("quality", policy="no-such-*"))


def test_a_baseline_of_another_benchmark_is_incomparable(base, run_of):
    head = run_of()
    manifest = {**head.manifest, "benchmarks": [{**head.manifest["benchmarks"][0], "benchmark_hash": "other"}]}
    assert gate(replace(head, manifest=manifest), base, rules("quality"))[0].verdict is Verdict.INCOMPARABLE


def test_no_shared_document_is_incomparable(base, run_of):
    head = run_of()
    moved = head.per_document.assign(document=head.per_document["document"] + 1000)
    judged = gate(replace(head, per_document=moved), base, rules("quality"))
    assert judged[0].verdict is Verdict.INCOMPARABLE
    assert "share no test document" in judged[0].reason


def test_a_head_whose_figure_is_not_a_number_fails_and_such_a_baseline_is_incomparable(base):
    documents = base.per_document.copy()
    documents.loc[documents["policy"] == "latent-diff", "quality_sum"] = np.nan
    broken = replace(base, per_document=documents)
    assert gate(broken, base, rules("quality"))[0].verdict is Verdict.FAIL
    assert gate(base, broken, rules("quality"))[0].verdict is Verdict.INCOMPARABLE


def test_a_warning_rule_tells_but_does_not_stop(base, run_of):
    judged = gate(run_of(model_hash="cccc"), base, rules("hypervolume", incomparable="warn"))
    assert judged[0].verdict is Verdict.INCOMPARABLE and judged[0].softened
    assert exit_code(judged) == 0


def timed(step_s: float, seed: int) -> dict:
    clock = FakeClock()
    rng = np.random.default_rng(seed)

    def run() -> int:
        clock.advance(step_s * (1 + 0.01 * rng.standard_normal()))
        return 100

    protocol = Protocol(min_runs=30, min_time_s=0.0, warm_ups=1)
    return measure([TimedPoint("policy", run)], protocol, clock, np.random.default_rng(0))[0].columns()


def latency_frame(run, step_s: float, seed: int) -> pd.DataFrame:
    threshold = run.iso.set_index("policy").loc["latent-diff", "threshold"]
    key = {"model": "demo", "benchmark": "docs", "seed": 0, "policy": "latent-diff", "threshold": threshold}
    return pd.DataFrame([{**key, "device": "cpu", "batch_rows": 8, "mode": "eager", "phase": "decode", **timed(step_s, seed)}])


def test_a_tenth_slower_step_is_caught_and_the_same_step_passes(base):
    before = replace(base, latency=latency_frame(base, 0.010, 1))
    slow_rule = GateRules.model_validate({"rules": [{"quantity": "latency", "margin": "5%", "policy": "latent-diff"}]})
    for step_s, verdict in ((0.010, Verdict.PASS), (0.011, Verdict.FAIL)):
        judged = gate(replace(base, latency=latency_frame(base, step_s, 2)), before, slow_rule)
        assert [each.verdict for each in judged] == [verdict]
    assert judged[0].difference.value == pytest.approx(0.1, abs=0.02)


def test_seconds_of_another_machine_are_incomparable(base):
    slow_rule = GateRules.model_validate({"rules": [{"quantity": "latency", "margin": "5%", "policy": "latent-diff"}]})
    before = replace(base, latency=latency_frame(base, 0.010, 1))
    environment = {**base.manifest["environment"], "cpu": {"model": "another", "cores": 2, "mhz": 1.0}}
    head = replace(before, manifest={**base.manifest, "environment": environment})
    assert gate(head, before, slow_rule)[0].verdict is Verdict.INCOMPARABLE


def test_executed_points_are_judged_against_the_same_uniform_depths(base):
    documents = base.per_document.astype({"evidence": str})
    acted = documents[(documents["policy"] == "latent-diff") & (documents["split"] == "test")].assign(evidence="executed")
    known = base.points[(base.points["policy"] == "latent-diff") & (base.points["split"] == "test")]
    points = known.assign(evidence="executed")
    run = replace(base, per_document=pd.concat([documents, acted]), points=pd.concat([base.points, points]))
    judged = gate(run, run, rules("quality", "mean_depth", "flops", "hypervolume", evidence="executed"))
    assert [each.verdict for each in judged] == [Verdict.PASS] * 4
    assert gate(base, base, rules("quality", evidence="executed"))[0].verdict is Verdict.INCOMPLETE


def test_the_sign_test_is_exact_and_equal_differences_are_no_evidence():
    assert sign_test(np.zeros(5)) == 1.0
    assert math.isnan(sign_test(np.array([np.nan, 0.0])))
    assert sign_test(np.array([1, 1, 1, 1, 1, 0])) == pytest.approx(2 / 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: []", "at least 1"),
        ("rules: [{quantity: qualty, margin: 0.1, policy: kl}]", "quantity"),
        ("rules: [{quantity: quality, margn: 0.1, policy: kl}]", "margin"),
        ("rules: [{quantity: latency, margin: 0.1, policy: kl}]", "write 5%"),
        ("rules: [{quantity: quality, margin: -1, policy: kl}]", "greater than or equal"),
        ("rules: [{quantity: hypervolume, margin: 1, policy: kl, threshold: 2}]", "leave threshold out"),
        ("rules: [{quantity: quality, margin: 1, policy: kl}, {quantity: quality, margin: 1, policy: kl}]", "twice"),
        ("rule: []", "rules"),
    ],
)
def test_a_broken_rules_file_says_where(tmp_path, text, message):
    file = tmp_path / "gate.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        parse(GateRules, load_yaml(file), str(file))


def test_a_new_baseline_is_what_a_gate_reads_and_no_more(base, tmp_path):
    folder = tmp_path / "baseline"
    folder.mkdir()
    (folder / "gate.yaml").write_text("rules: []")
    update_baseline(base, folder)
    update_baseline(base, folder)
    assert not (folder / "trace").exists()
    assert exit_code(gate(base, load_run(folder), rules(*QUANTITIES))) == 0
    with pytest.raises(UserError, match="is the run itself"):
        update_baseline(base, base.path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match=r"letter\.txt"):
        update_baseline(base, tmp_path / "other")
