"""Core steps as CUDA graphs: one fixed-shape graph for each bucket of rows and of positions, replayed without launches.

Shapes: R rows, rounded up to a bucket; D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from halting_bench.architectures.base import RecurrentModel
from halting_bench.engine.contexts import SlotContext
from halting_bench.engine.kv_cache import KvCache, Workspace
from halting_bench.errors import UserError, unknown_name

MODES = ("eager", "graph")
POSITIONS = 64
"""Positions read by a graph are a multiple of this."""

Run = Callable[[], Tensor]
Capture = Callable[[Run], tuple[Callable[[], None], Tensor]]
"""Records a run; returns what replays it, and the tensor that a replay fills."""


def core_step(model: RecurrentModel, mode: str, workspace: Workspace | None) -> "GraphedCore | None":
    """What runs core steps in a mode; None: the model itself. Graphs are kept in the workspace, when there is one.

    Raises:
        UserError: an unknown mode, or `graph` without CUDA.
    """
    if mode not in MODES:
        raise unknown_name("mode", mode, MODES)
    if mode == "eager":
        return None
    if next(model.parameters()).device.type != "cuda":
        raise UserError("mode 'graph' needs a CUDA device: move the model there or type eager")
    return GraphedCore(model, CudaCapture(), Workspace() if workspace is None else workspace)


class CudaCapture:
    """Records into CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> tuple[Callable[[], None], Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries set themselves up outside the graph
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = run()
        return graph.replay, out


class GraphedCore:
    """A CoreStep (see slots.py) of fixed shapes. Rows that fill up a bucket live in the cache's spare slot."""

    def __init__(self, model: RecurrentModel, capture: Capture, workspace: Workspace):
        self.model, self.capture, self.steps = model, capture, workspace.recorded

    def __call__(self, loop: int, state: Tensor, x: Tensor, context: SlotContext) -> Tensor:
        rows = 1 << (len(state) - 1).bit_length()
        top = min(-(-context.top // POSITIONS) * POSITIONS, context.cache.length)
        key = (loop, rows, top)
        if key not in self.steps:
            self.steps[key] = _FixedStep(self.model, loop, rows, top, state, context.cache, self.capture)
        return self.steps[key](state, x, context)


class _FixedStep:
    """One bucket's buffers and its recorded step."""

    def __init__(self, model: RecurrentModel, loop: int, rows: int, top: int, like: Tensor, cache: KvCache, capture: Capture):
        self.state, self.x = (torch.zeros(rows, like.shape[1], dtype=like.dtype, device=like.device) for _ in range(2))
        self.positions = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self.slots = torch.full_like(self.positions, cache.slots - 1)
        self.steps = torch.ones_like(self.positions)
        self.replay: Callable[[], None] | None = None
        self.out = self.state

        def run() -> Tensor:
            context = SlotContext(cache, self.slots, self.positions, top, fixed=True)
            return model.step(loop, self.state, self.x, context.at(loop, self.steps))

        self.run, self.capture = run, capture

    def __call__(self, state: Tensor, x: Tensor, context: SlotContext) -> Tensor:
        count = len(state)
        self.state[:count], self.x[:count] = state, x
        self.slots[:count], self.positions[:count], self.steps[:count] = context.slots, context.positions, context.steps
        self.slots[count:] = context.cache.slots - 1
        if self.replay is None:
            self.replay, self.out = self.capture(self.run)
        self.replay()
        return self.out[:count].clone()
