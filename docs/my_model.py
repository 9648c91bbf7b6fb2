"""A looped model of one's own, complete: halting-bench doctor docs/my_model.py@MyLoopedModel."""

import torch
from torch import nn

from halting_bench.architectures.base import LoopSpec, ModelSpec, RecurrentModel


class MyLoopedModel(RecurrentModel):
    def __init__(self, width: int = 32, heads: int = 4, length: int = 512):
        super().__init__()
        core = LoopSpec("core", layers=1, random_start=False)
        self.spec = ModelSpec(
            family="mine", width=width, vocab_size=256, max_length=length, mean_recurrence=8, loops=(core,),
            layers=1, heads=heads, kv_heads=heads, head_width=width // heads,
        )  # fmt: skip
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, 256)
        generator = torch.Generator().manual_seed(0)  # load your weights here instead
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.2, generator=generator)

    def embed(self, tokens, context):  # [*] -> [*, D]; the rows' positions are the context's
        return self.tokens(tokens) + self.places(context.positions)

    def begin(self, loop, x, noise):  # s_0
        return torch.zeros_like(x)

    def step(self, loop, state, x, context):  # s_{k-1} -> s_k; attention only through the context
        q, k, v = (part.unflatten(-1, (self.spec.heads, -1)) for part in self.qkv(self.norm(state + x)).chunk(3, dim=-1))
        state = state + x + self.out(context.attend(0, q, k, v).flatten(-2))
        return self.norm(state + self.mlp(self.norm(state)))

    def end(self, loop, state, context):  # the last state -> what is read out
        return state

    def readout(self, x, context):  # [*, D] -> logits [*, V]
        return self.head(x)
