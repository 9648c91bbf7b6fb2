"""Policies that ride along in a trace without ever halting: a user's own class is known only by what it answers.

Shapes: N rows.
"""

import traceback

import torch
from torch import Tensor

from halting_bench.halting.policy import HaltingPolicy, State, View


class Riders:
    """The first step at which each policy would have stopped each row of one batch.

    A policy is the user's code: one that raises drops out with its error, and the trace and the others go on.
    """

    def __init__(self, policies: dict[str, HaltingPolicy], start: View, never: int):
        """
        Args:
            policies: by the key that the trace knows them by.
            start: the initial states of the batch.
            never: the exit step of a row that is never stopped, R + 1.
        """
        self.exits: dict[str, Tensor] = {}
        self.errors: dict[str, str] = {}
        self._policies = dict(policies)
        self._states: dict[str, State] = {}
        for key, policy in policies.items():
            try:
                self._states[key] = policy.init(start)
                self.exits[key] = torch.full_like(start.step, never)
            except Exception as error:
                self._drop(key, error)

    def step(self, view: View) -> None:
        """Shows one core step to every policy that still rides."""
        for key, policy in list(self._policies.items()):
            first = self.exits[key]
            try:
                verdict, self._states[key] = policy.step(view, self._states[key])
                if verdict.halt.shape != first.shape or verdict.halt.dtype != torch.bool:
                    found = f"{verdict.halt.dtype} {list(verdict.halt.shape)}"
                    raise TypeError(f"a verdict's halt must be torch.bool {list(first.shape)}, not {found}")
                self.exits[key] = torch.where(verdict.halt & (first > view.step), view.step, first)
            except Exception as error:
                self._drop(key, error)

    def _drop(self, key: str, error: Exception) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        self.errors[key] = f"{type(error).__name__}: {error} ({place.filename.rpartition('/')[2]}, line {place.lineno})"
        del self._policies[key]
        self.exits.pop(key, None)
