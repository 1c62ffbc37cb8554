"""The oracle: MLA attention on the whole sequence in one process by plain autograd; no code of the library in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Case", "Expected", "Inputs", "make_inputs", "oracle", "visibility"]


@dataclass(frozen=True)
class Case:
    """A problem on the whole sequence; `lengths` are document lengths (one for a single sequence)."""

    lengths: tuple[int, ...] = (22,)
    batch: int = 1
    heads: int = 12
    nope: int = 6
    rope: int = 4
    v: int = 5
    rank: int = 8
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float64

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def cu_seqlens(self) -> list[int]:
        return [sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)]

    def with_(self, **changes: object) -> Case:
        return replace(self, **changes)


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # [B, S, H, nope + rope]
    c_kv: Tensor  # [B, S, r]
    k_rope: Tensor  # [B, S, rope]
    weight: Tensor  # [H * (nope + v), r]
    dout: Tensor  # [B, S, H, v]
    dlse: Tensor  # [B, H, S]


@dataclass(frozen=True)
class Expected:
    out: Tensor
    lse: Tensor
    dq: Tensor
    dc_kv: Tensor
    dk_rope: Tensor
    dweight: Tensor


def make_inputs(case: Case) -> Inputs:
    """Random inputs, rounded to the case's dtype and held in fp64 so that every side starts from the same numbers."""
    g = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(case.dtype).double()

    b, s, h = case.batch, case.tokens, case.heads
    return Inputs(
        q=normal(b, s, h, case.nope + case.rope),
        c_kv=normal(b, s, case.rank),
        k_rope=normal(b, s, case.rope),
        weight=normal(h * (case.nope + case.v), case.rank) / case.rank**0.5,
        dout=normal(b, s, h, case.v),
        dlse=normal(b, h, s),
    )


def visibility(lengths: Sequence[int], causal: bool, window: int | None) -> Tensor:
    """`[S, S]` bool: which query (row) sees which key."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(list(lengths)))
    place = torch.arange(len(document))
    distance = place[:, None] - place[None, :]
    seen = document[:, None] == document[None, :]
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    return seen


def oracle(case: Case, inputs: Inputs, *, with_dlse: bool = False, dtype: torch.dtype = torch.float64) -> Expected:
    """Outputs and all gradients, in `dtype` (fp64, or bf16 for the error that single-process explicit makes)."""
    q, c_kv, k_rope, weight = (
        t.to(dtype, copy=True).requires_grad_() for t in (inputs.q, inputs.c_kv, inputs.k_rope, inputs.weight)
    )
    kv = (c_kv @ weight.mT).unflatten(-1, (case.heads, case.nope + case.v))  # [B, S, H, nope + v]
    k = torch.cat([kv[..., : case.nope], k_rope[:, :, None].expand(-1, -1, case.heads, -1)], -1)
    scale = case.scale or (case.nope + case.rope) ** -0.5
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    acc = torch.promote_types(dtype, torch.float32)
    scores = scores.to(acc).masked_fill(~visibility(case.lengths, case.causal, case.window), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    probs = torch.exp(scores - lse[..., None]).to(dtype)
    out = torch.einsum("bhqk,bkhd->bqhd", probs, kv[..., case.nope :])
    loss = (out * inputs.dout.to(dtype)).sum()
    if with_dlse:
        loss = loss + (lse * inputs.dlse.to(acc)).sum()
    grads = torch.autograd.grad(loss, (q, c_kv, k_rope, weight))
    return Expected(out.detach(), lse.detach(), *grads)
