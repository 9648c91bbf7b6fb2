"""What is timed: prefill (a text scored with the policy acting) and decoding, each with its bracket of uniform depths.

Accuracy and speed are told apart but must agree: a policy first runs once untimed, and every timed run has to repeat that
run's decisions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from halting_bench.architectures.base import RecurrentModel
from halting_bench.benchmarks.base import Sequence
from halting_bench.engine.decode import decode
from halting_bench.engine.kv_cache import Workspace
from halting_bench.engine.meter import Meter
from halting_bench.engine.score import Executed, execute
from halting_bench.errors import UserError
from halting_bench.halting.policies import FixedDepth
from halting_bench.halting.policy import HaltingPolicy
from halting_bench.timing.bracket import Bracket, bracket, neighbours
from halting_bench.timing.clock import Clock
from halting_bench.timing.protocol import TimedPoint, Timing

PROMPT = "prompt"
"""Key of the point that decodes one token only: what it takes is subtracted from the others of a decode plan."""


@dataclass(frozen=True)
class Work:
    """A policy at a measured shape. mean_depth: core applications a timed token and loop, in the untimed run."""

    point: TimedPoint
    mean_depth: float
    stages: Callable[[Clock], dict[str, float]]  # runs once more; seconds in core, readout, signal, bookkeeping


Build = Callable[[str, HaltingPolicy], Work]
"""(key, policy) -> its work at some shape."""


def prefill(
    model: RecurrentModel, sequences: list[Sequence], *, max_steps: int, kv_mode: str = "latest", seed: int = 0
) -> Build:
    """Scores sequences of one length, all side by side. The tokens are all their positions.

    Args:
        model: any family.
        sequences: one a batch row (see `fixed_length`).
        max_steps: R.
        kv_mode: see KvMode.
        seed: of the initial states.
    """
    positions = sum(len(sequence.tokens) for sequence in sequences)

    def build(key: str, policy: HaltingPolicy) -> Work:
        def score(clock: Callable[[], float] | None = None) -> Executed:
            return execute(
                model, sequences, policy, max_steps=max_steps, kv_mode=kv_mode, seed=seed, batch_rows=positions, clock=clock
            )

        reference = score()
        _must_fit(reference.halvings, len(sequences))

        def run() -> int:
            executed = score()
            _must_agree(np.array_equal(executed.exit_per_loop, reference.exit_per_loop), "exits")
            return positions

        def stages(clock: Clock) -> dict[str, float]:
            return score(clock.now).seconds or {}

        depth = reference.core_steps / positions / len(model.spec.loops)
        return Work(TimedPoint(key, run), depth, stages)

    return build


def decoding(
    model: RecurrentModel,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    max_steps: int,
    kv_mode: str = "latest",
    seed: int = 0,
    mode: str = "eager",
) -> Build:
    """Greedy decoding of prompts of one length, all at once. The tokens are the new ones but for each sequence's first.

    Prompts run at the trained depth, whatever the policy: the same work in every point, which the point `PROMPT` tells.

    Args:
        model: a causal model.
        prompts: one a batch row.
        max_new_tokens: a sequence, at least 2: a prompt's last row makes the first one.
        max_steps: R.
        kv_mode: see KvMode.
        seed: of the initial states.
        mode: eager or graph.

    Raises:
        UserError: fewer than two new tokens.
    """
    if max_new_tokens < 2:
        raise UserError(f"max_new_tokens {max_new_tokens} leaves nothing to time after the prompt: type 2 or more")

    shared = {1: Workspace(), max_new_tokens: Workspace()}  # page faults and graph capture belong to no timed run

    def build(key: str, policy: HaltingPolicy) -> Work:
        new_tokens = 1 if key == PROMPT else max_new_tokens

        def continue_all(meter: Meter | None = None) -> list[tuple[list[int], list[int]]]:
            done = decode(
                model,
                prompts,
                policy,
                max_new_tokens=new_tokens,
                max_steps=max_steps,
                slots=len(prompts),
                kv_mode=kv_mode,
                prefill="full",
                seed=seed,
                mode=mode,
                meter=meter,
                workspace=shared[new_tokens],
            )
            return [(result.tokens, result.steps) for result in done]

        first = Meter()
        reference = continue_all(first)
        _must_fit(first.halvings, len(prompts))

        def run() -> int:
            _must_agree(continue_all() == reference, "tokens")
            return sum(max(len(tokens) - 1, 0) for tokens, _ in reference)

        def stages(clock: Clock) -> dict[str, float]:
            meter = Meter(clock.now)
            continue_all(meter)
            return meter.seconds

        depths = [step for _, steps in reference for step in steps[1:]]
        depth = float(np.mean(depths)) / len(model.spec.loops) if depths else 0.0
        return Work(TimedPoint(key, run), depth, stages)

    return build


def _must_fit(halvings: int, rows: int) -> None:
    if halvings:  # what would be timed are other shapes than the row says
        raise MemoryError(f"{rows} rows do not fit into memory: type fewer, --batch-rows {max(rows >> halvings, 1)}")


def _must_agree(same: bool, what: str) -> None:
    if not same:
        raise RuntimeError(f"a timed run made other {what} than the untimed one")


@dataclass(frozen=True)
class BracketPlan:
    """Policies and the uniform depths around each, at one shape."""

    policies: dict[str, Work]
    uniform: dict[int, Work]
    prompt: Work | None  # of a decode plan
    max_steps: int
    trained: int

    @property
    def points(self) -> list[TimedPoint]:
        """What to measure: a time budget that cuts the end leaves whole brackets."""
        order = [self.prompt] if self.prompt else []
        order += [self.uniform[self.max_steps], self.uniform[self.trained]]
        for work in self.policies.values():
            order += [*(self.uniform[depth] for depth in neighbours(work.mean_depth)), work]
        return list({work.point.key: work.point for work in order}.values())

    def read(self, timings: list[Timing]) -> tuple[dict[str, Timing], dict[str, Bracket]]:
        """Reads what `measure` returned.

        Args:
            timings: of `points`.

        Returns:
            The timings by key, prompts subtracted, and the bracket of each policy.
        """
        by_key = {timing.key: timing for timing in timings}
        if self.prompt:
            by_key = {key: _without_prompt(timing, by_key[PROMPT]) for key, timing in by_key.items() if key != PROMPT}

        def at(depth: int) -> Timing:
            return by_key[self.uniform[depth].point.key]

        brackets = {}
        for name, work in self.policies.items():
            below, above = neighbours(work.mean_depth)
            brackets[name] = bracket(
                mean_depth=work.mean_depth,
                max_steps=self.max_steps,
                full=at(self.max_steps),
                below=at(below),
                above=at(above),
                policy=by_key[work.point.key],
                trained=at(self.trained),
            )
        return by_key, brackets


def bracket_plan(
    build: Build, policies: Mapping[str, HaltingPolicy], *, max_steps: int, trained: int, prompts: bool = False
) -> BracketPlan:
    """Runs every policy once, untimed, and adds the uniform depths that their brackets need.

    Args:
        build: `prefill(...)` or `decoding(...)`.
        policies: by the key of their timing, in order of importance.
        max_steps: R, as in `build`.
        trained: the model's mean recurrence.
        prompts: whether `build` decodes, so that prompts are timed apart.
    """
    works = {key: build(key, policy) for key, policy in policies.items()}
    trained = min(trained, max_steps)
    depths = {max_steps, trained}.union(*(neighbours(work.mean_depth) for work in works.values()))
    uniform = {depth: build(f"fixed@{depth}", FixedDepth(depth)) for depth in sorted(depths)}
    prompt = build(PROMPT, FixedDepth(trained)) if prompts else None
    return BracketPlan(works, uniform, prompt, max_steps, trained)


def _without_prompt(timing: Timing, prompt: Timing) -> Timing:
    if timing.status == "ok" and prompt.status != "ok":
        return replace(timing, status="skipped", error=f"its prompts were not timed ({prompt.error})")
    return replace(timing, prompt_s=prompt.seconds().value)


def fixed_length(sequences: list[Sequence], rows: int, length: int) -> list[Sequence]:
    """`rows` sequences of exactly `length` tokens: the first that are long enough, cut; repeated, each with initial states
    of its own, when there are too few.

    Raises:
        UserError: none is long enough.
    """
    long = [sequence for sequence in sequences if len(sequence.tokens) >= length]
    if not long:
        longest = max((len(sequence.tokens) for sequence in sequences), default=0)
        raise UserError(f"no sequence has {length} tokens to time, the longest has {longest}: type a shorter latency length")
    chosen = [long[row % len(long)] for row in range(rows)]
    return [Sequence(s.document, row, s.tokens[:length], s.targets[:length]) for row, s in enumerate(chosen)]
