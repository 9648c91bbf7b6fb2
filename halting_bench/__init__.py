"""halting-bench: quality against mean depth and real latency for halting policies of depth-recurrent transformers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halting_bench.halting.policies import AllOf, AnyOf, FixedDepth, ThresholdPolicy
    from halting_bench.halting.policy import HaltingPolicy, State, Verdict, View
    from halting_bench.store import Run, load_run
    from halting_bench.sweep_config import SweepConfig
    from halting_bench.sweeping.run import sweep

_HOMES = {
    "sweep": "sweeping.run",
    "SweepConfig": "sweep_config",
    "load_run": "store",
    "Run": "store",
    "HaltingPolicy": "halting.policy",
    "State": "halting.policy",
    "Verdict": "halting.policy",
    "View": "halting.policy",
    "ThresholdPolicy": "halting.policies",
    "FixedDepth": "halting.policies",
    "AnyOf": "halting.policies",
    "AllOf": "halting.policies",
}

__all__ = [
    "AllOf",
    "AnyOf",
    "FixedDepth",
    "HaltingPolicy",
    "Run",
    "State",
    "SweepConfig",
    "ThresholdPolicy",
    "Verdict",
    "View",
    "load_run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Public names are loaded at first use, so that importing the package does not import torch."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'halting_bench' has no attribute '{name}'")
    return getattr(importlib.import_module(f"halting_bench.{_HOMES[name]}"), name)
