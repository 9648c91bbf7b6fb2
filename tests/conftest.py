"""Shared by all tests: one thread (they run beside others), and hypothesis without clocks or chance."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("repeatable")
