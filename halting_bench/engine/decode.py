"""Decoding with a policy that acts: greedy or sampled, one sequence or thousands, through a fixed number of slots."""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from halting_bench.architectures.base import RecurrentModel
from halting_bench.engine.graphs import core_step
from halting_bench.engine.kv_cache import KvMode, Workspace
from halting_bench.engine.memory import halve, is_out_of_memory
from halting_bench.engine.meter import Meter
from halting_bench.engine.prefill import check_length, check_prefill, runs_as_prompt
from halting_bench.engine.requests import Decoded, Progress, Request
from halting_bench.engine.sampling import Sampling
from halting_bench.engine.slots import SlotEngine
from halting_bench.engine.tables import Plan
from halting_bench.errors import UserError
from halting_bench.halting.policy import HaltingPolicy

GREEDY = Sampling()


def decode(
    model: RecurrentModel,
    prompts: list[list[int]],
    policy: HaltingPolicy,
    *,
    max_new_tokens: int,
    max_steps: int,
    slots: int,
    sampling: Sampling = GREEDY,
    stop: Iterable[int] = (),
    kv_mode: str = "latest",
    prefill: str = "adaptive",
    seed: int = 0,
    uids: list[int] | None = None,
    thresholds: list[float] | None = None,
    mode: str = "eager",
    meter: Meter | None = None,
    workspace: Workspace | None = None,
) -> list[Decoded]:
    """Continues prompts. The tokens of a sequence do not depend on its batch, on the order, or on `slots`.

    Args:
        model: a causal model.
        prompts: token ids, at least one each.
        policy: decides, at every token, how many core steps it gets.
        max_new_tokens: a sequence ends there, or at a stop token, or when its state breaks.
        max_steps: cap of core steps a token and loop.
        slots: sequences at once.
        sampling: greedy by default.
        stop: token ids that end a sequence.
        kv_mode: what later tokens see of one that exited early (see KvMode).
        prefill: adaptive, full or shared (see prefill.PREFILLS).
        seed: of the initial states.
        uids: identities that seed each sequence's initial states and draws; by default its place in `prompts`.
        thresholds: one a prompt, for different operating points of the policy in one batch.
        mode: eager, or graph (CUDA only): each core step replayed as a CUDA graph.
        meter: counts the work done, and times it when it has a clock.
        workspace: K/V memory and recorded graphs to use again, where one shape is decoded many times.

    Returns:
        One result a prompt, in the order of `prompts`.

    Raises:
        UserError: a prompt is empty or too long, or a name is unknown.
    """
    names = list(range(len(prompts))) if uids is None else uids
    if len(set(names)) != len(prompts):
        raise UserError(f"{len(prompts)} prompts need as many different uids, not {len(set(names))}: leave `uids` out")
    own: list[float] | list[None] = [None] * len(prompts) if thresholds is None else thresholds
    queue = [Request(u, np.asarray(p), max_new_tokens, threshold=t) for u, p, t in zip(names, prompts, own, strict=True)]
    done = stream(
        model,
        queue,
        policy,
        max_prompt=max((len(p) for p in prompts), default=1),
        max_new_tokens=max_new_tokens,
        max_steps=max_steps,
        slots=min(slots, max(len(prompts), 1)),
        sampling=sampling,
        stop=stop,
        kv_mode=kv_mode,
        prefill=prefill,
        seed=seed,
        mode=mode,
        meter=meter,
        workspace=workspace,
    )
    by_uid = {result.uid: result for result in done}
    return [by_uid[uid] for uid in names]


def stream(
    model: RecurrentModel,
    requests: Iterable[Request],
    policy: HaltingPolicy,
    *,
    max_prompt: int,
    max_new_tokens: int,
    max_steps: int,
    slots: int,
    sampling: Sampling = GREEDY,
    stop: Iterable[int] = (),
    kv_mode: str = "latest",
    prefill: str = "adaptive",
    seed: int = 0,
    mode: str = "eager",
    meter: Meter | None = None,
    workspace: Workspace | None = None,
) -> Iterator[Decoded]:
    """As `decode`, but yields each sequence when it finishes and reads requests only as slots come free.

    Memory does not grow with the number of requests. Interrupting it loses nothing that was yielded.

    Args:
        model, policy, max_steps, slots, sampling, stop, kv_mode, prefill, seed, mode, meter, workspace: as in `decode`.
        requests: any number; none longer than max_prompt and max_new_tokens.
        max_prompt: the longest prompt.
        max_new_tokens: the most that a request asks for.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("max_steps", max_steps), ("slots", slots)):
        if value < 1:
            raise UserError(f"{name} {value} must be at least 1")
    plan = Plan(
        slots=slots,
        length=max_prompt + max_new_tokens,
        max_steps=max_steps,
        mode=KvMode.parse(kv_mode).executable(),
        prefill=check_prefill(prefill),
        seed=seed,
        sampling=sampling,
        stop=frozenset(stop),
        spare=mode == "graph",
        workspace=workspace,
    )
    checked = (_checked(request, model, plan, policy) for request in requests)
    for progress in serve(model, policy, plan, checked, Meter() if meter is None else meter, mode):
        yield progress.decoded()


def _checked(request: Request, model: RecurrentModel, plan: Plan, policy: HaltingPolicy) -> Request:
    prompt, new = len(request.tokens), request.max_new_tokens
    check_length(prompt, new, model)
    if prompt + new > plan.length:
        raise UserError(f"request {request.uid} has {prompt} + {new} tokens, slots hold {plan.length}: raise max_prompt")
    return request if not runs_as_prompt(policy, plan) else request.as_prompt(prompt)


def serve(
    model: RecurrentModel, policy: HaltingPolicy, plan: Plan, requests: Iterator[Request], meter: Meter, mode: str = "eager"
) -> Iterator[Progress]:
    """Runs requests through slots. Out of memory, unfinished sequences start again in half the slots, to the same tokens."""
    if not model.spec.causal:
        raise UserError(f"a {model.spec.family} model is not causal and cannot decode token by token: score it instead")
    waiting: deque[Request] = deque()
    running: dict[tuple[int, float | None], Request] = {}

    def queue() -> Iterator[Request]:
        while True:
            request = waiting.popleft() if waiting else next(requests, None)
            if request is None:
                return
            running[request.key] = request
            yield request

    while True:
        try:
            for progress in SlotEngine(model, policy, plan, meter, core_step(model, mode, plan.workspace)).run(queue()):
                del running[progress.request.key]
                yield progress
            break
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or plan.slots == 1:
                raise
        plan = plan.with_slots(halve(plan.slots, "slots"))
        meter.halvings += 1
        waiting.extendleft(reversed(running.values()))
        running.clear()
    meter.stop()
