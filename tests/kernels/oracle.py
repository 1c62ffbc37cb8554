"""Attention over spans by autograd, sharing nothing with the kernels, and the problems they are tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laga_attn.kernels import Kernel
from laga_attn.spans import Span

__all__ = ["MASKS", "Problem", "mask", "problem"]

# Blocks of the kernels are cut at 64, 96, 144 and 256, which these do not divide.
MASKS: dict[str, list[Span]] = {
    "causal": [Span(0, 300, 0, 300, True)],
    "full": [Span(0, 300, 0, 437, False)],
    "more keys": [Span(0, 300, 0, 437, True)],
    "more queries": [Span(0, 300, 0, 211, True)],
    "window": [Span(0, 300, 0, 437, True, 37)],
    "wide window": [Span(0, 300, 0, 437, True, 280)],
    "documents": [Span(0, 90, 0, 90, True), Span(90, 210, 90, 210, True)],
    "shared keys": [Span(0, 120, 0, 200, True), Span(150, 140, 0, 430, True)],
    "gaps": [Span(5, 100, 20, 50, True), Span(110, 150, 30, 400, True, 300), Span(260, 30, 3, 300, False)],
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Inputs of forward and backward, and the gradient of lse."""

    q: Tensor  # [B, Sq, h, Dqk]
    k: Tensor  # [B, Sk, hk, Dqk]
    v: Tensor  # [B, Sk, hk, Dv]
    dout: Tensor  # [B, Sq, h, Dv]
    dlse: Tensor  # [B, h, Sq]
    spans: list[Span]
    scale: float

    def expected(self) -> tuple[Tensor, ...]:
        """Out, lse, dq, dk, dv in float64, by autograd. A query that sees nothing has out 0, lse -inf, gradient 0."""
        q, k, v = (x.double().requires_grad_() for x in (self.q, self.k, self.v))
        visible = mask(self.spans, q.shape[1], k.shape[1])
        heads = q.shape[2] // k.shape[2]
        wide_k, wide_v = k.repeat_interleave(heads, dim=2), v.repeat_interleave(heads, dim=2)
        scores = torch.einsum("bihd,bjhd->bhij", q, wide_k) * self.scale
        scores = scores.masked_fill(~visible, -torch.inf)
        seen = visible.any(dim=1)
        safe = torch.where(seen.unsqueeze(1), scores, 0.0)
        lse = torch.where(seen, safe.logsumexp(dim=-1), -torch.inf)
        out = torch.einsum("bhij,bjhd->bihd", safe.softmax(dim=-1), wide_v) * seen[:, None, None]
        finite = torch.where(seen, lse, 0.0)
        ((out * self.dout.double()).sum() + (finite * self.dlse.double()).sum()).backward()
        return tuple(x.detach() for x in (out, lse)) + tuple(x.grad for x in (q, k, v))

    def actual(self, kernel: Kernel) -> tuple[Tensor, ...]:
        """Out, lse, dq, dk, dv of a kernel."""
        out, lse = kernel.forward(self.q, self.k, self.v, self.spans, self.scale)
        delta = self.delta(out, lse.dtype)
        return out, lse, *kernel.backward(self.dout, delta, self.q, self.k, self.v, lse, self.spans, self.scale)

    def delta(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        """What backward wants in place of ``out`` and the gradient of lse."""
        return (self.dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2) - self.dlse.to(dtype)

    def cast(self, dtype: torch.dtype) -> Problem:
        """The same problem in another dtype."""
        return replace(self, **{n: getattr(self, n).to(dtype) for n in ("q", "k", "v", "dout")})


def problem(
    spans: Sequence[Span],
    dims: tuple[int, int] = (24, 16),
    dtype: torch.dtype = torch.float64,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    seed: int = 0,
) -> Problem:
    """Random inputs with a few rows more than the spans reach, which no span holds."""
    g = torch.Generator().manual_seed(seed)
    rows = max(s.q_start + s.q_len for s in spans) + 3
    keys = max(s.k_start + s.k_len for s in spans) + 2
    kv_heads = heads if kv_heads is None else kv_heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    q, k, v = (
        draw(batch, rows, heads, dims[0]),
        draw(batch, keys, kv_heads, dims[0]),
        draw(batch, keys, kv_heads, dims[1]),
    )
    dlse = draw(batch, heads, rows).to(torch.float64 if dtype == torch.float64 else torch.float32)
    dlse = dlse * mask(spans, rows, keys).any(dim=1)  # lse of a query that sees nothing is constant
    return Problem(q, k, v, draw(batch, rows, heads, dims[1]), dlse, list(spans), dims[0] ** -0.5)


def mask(spans: Sequence[Span], rows: int, keys: int) -> Tensor:
    """Bool [rows, keys]: True where the query sees the key."""
    visible = torch.zeros(rows, keys, dtype=torch.bool)
    for s in spans:
        for i in range(s.q_len):
            last = s.k_len if not s.causal else i + s.k_len - s.q_len + 1
            first = 0 if s.window is None else max(last - s.window, 0)
            if last > first:
                visible[s.q_start + i, s.k_start + first : s.k_start + last] = True
    return visible
