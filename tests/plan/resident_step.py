"""Run by itself: the high-water mark of one attention step, by the kernel's books and by the tracer, in bytes.

The allocator must give freed memory back at once, which it is told by variables that it reads when the process starts.
"""

from __future__ import annotations

import sys

import torch

import laga_attn as laga
from laga_attn.bench.resident import resident_growth
from laga_attn.plan.trace import Trace

# The weight is small: a gradient that is allocated, but not written yet, is traced and not resident.
HEADS, TOKENS, NOPE, ROPE, V, RANK = 20, 2048, 128, 64, 128, 128
TOLERANCE = 0.005


def main(scheme: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    layout = laga.SequenceLayout.zigzag(TOKENS, 1)
    shapes = ((1, TOKENS, HEADS, NOPE + ROPE), (1, TOKENS, RANK), (1, TOKENS, ROPE), (HEADS * (NOPE + V), RANK))
    leaves = [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]
    gradient = torch.randn(1, TOKENS, HEADS, V, dtype=dtype)

    def step() -> None:
        out = laga.latent_attention(
            *leaves,
            layout=layout,
            scheme=scheme,
            qk_nope_head_dim=NOPE,
            v_head_dim=V,
            kernel="blockwise",
        )
        torch.autograd.grad(out, leaves, gradient)

    with Trace(look_inside=True) as trace:
        step()
    traced = trace.memory.peak().nbytes
    # A second and a third try: a system that takes idle pages back makes them count again.
    for _ in range(3):
        resident = resident_growth(step)
        if resident is None or agree(resident, traced):
            break
    print(resident, traced)


def agree(resident: int, traced: int) -> bool:
    """Whether the two are the same but for what the process needs around its tensors."""
    return abs(resident / traced - 1) <= TOLERANCE


if __name__ == "__main__":
    main(sys.argv[1], getattr(torch, sys.argv[2]))
