"""Every kernel that a device can use, against plain formulas in fp64 on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from laga_attn.kernels import Kernel, kernels_here, select
from laga_attn.spans import Span

__all__ = ["RIGHT", "KernelCheck", "check_kernels"]

DIMS = ((192, 128), (128, 128), (64, 64))
RIGHT = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""What the errors of right results stay below; a wrong mask, scale or delta makes errors near 1."""
BATCH, HEADS = 2, 3


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """The largest relative error of out, lse, dq, dk and dv; infinite, with a reason, where the kernel failed."""

    kernel: str
    dtype: str
    dims: tuple[int, int]
    mask: str
    lse_gradient: bool
    error: float
    failure: str = ""

    @property
    def right(self) -> bool:
        return self.error <= RIGHT[self.dtype]


def masks(unit: int) -> dict[str, list[Span]]:
    """Masks with all that kernels treat apart, at lengths that no tile divides."""
    n, m = 7 * unit + 3, 10 * unit + 1
    return {
        "causal": [Span(0, n, 0, n, True)],
        "full": [Span(0, n, 0, m, False)],
        "more keys": [Span(0, n, 0, m, True)],
        "more queries": [Span(0, m, 0, n, True)],
        "window": [Span(0, n, 0, m, True, 2 * unit + 1)],
        "documents": [Span(0, unit, 0, unit, True), Span(unit, 1, unit, 1, True), Span(unit + 1, n, unit + 1, n, True)],
        "shared keys": [Span(2, unit, 0, m, False), Span(unit + 9, n, 5, m - 5, True)],
    }


def check_kernels(device: torch.device, small: bool) -> Iterator[KernelCheck]:
    """One check for each kernel, dtype, head dims and mask, with a gradient of the LSE where the kernel takes one."""
    for dtype, dims, (mask, spans) in product(RIGHT, DIMS, masks(8 if small else 100).items()):
        tensors = _tensors(spans, dims, getattr(torch, dtype), device)
        exact: dict[bool, list[Tensor]] = {}
        for name in kernels_here(device, getattr(torch, dtype)):
            usable = _usable(name, device, dtype, dims, mask == "window")
            if usable is None:
                continue
            kernel, lse_gradient = usable
            if lse_gradient not in exact:
                exact[lse_gradient] = _results(Kernel("reference"), [x.double() for x in tensors], spans, lse_gradient)
            try:
                actual = _results(kernel, tensors, spans, lse_gradient)
            except Exception as failure:  # one that cannot even be called should not hide the others
                yield KernelCheck(name, dtype, dims, mask, lse_gradient, float("inf"), f"{failure}")
                continue
            errors = [_error(a, e) for a, e in zip(actual, exact[lse_gradient], strict=True)]
            yield KernelCheck(name, dtype, dims, mask, lse_gradient, max(errors))


def _usable(
    name: str, device: torch.device, dtype: str, dims: tuple[int, int], window: bool
) -> tuple[Kernel, bool] | None:
    """The kernel, and whether it takes gradients of the LSE; None where it refuses the case."""
    for lse_gradient in (True, False):
        try:
            kernel = select(
                name, device=device, dtype=getattr(torch, dtype), qk_head_dim=dims[0], v_head_dim=dims[1],
                window=window, lse_gradient=lse_gradient,
            )  # fmt: skip
        except ValueError:
            continue
        return kernel, lse_gradient
    return None


def _tensors(spans: list[Span], dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v, dout and a gradient of lse; k and v are views of one buffer, as rebuilt ones are."""
    generator = torch.Generator().manual_seed(0)
    rows, keys = max(s.q_start + s.q_len for s in spans) + 3, max(s.k_start + s.k_len for s in spans) + 2

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    k, v = random(BATCH, keys, HEADS, sum(dims)).split(dims, dim=-1)
    q, dout = random(BATCH, rows, HEADS, dims[0]), random(BATCH, rows, HEADS, dims[1])
    return [q, k, v, dout, random(BATCH, HEADS, rows, dtype=torch.float32)]


def _results(kernel: Kernel, tensors: list[Tensor], spans: list[Span], lse_gradient: bool) -> list[Tensor]:
    """Out, lse, dq, dk, dv."""
    q, k, v, dout, dlse = tensors
    scale = q.shape[3] ** -0.5
    out, lse = kernel.forward(q, k, v, spans, scale)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    if lse_gradient:
        delta = delta - dlse.to(lse.dtype) * lse.isfinite()  # the LSE of a query that sees nothing is constant
    grads = kernel.backward(dout, delta.contiguous(), q, k, v, lse, spans, scale)
    assert ((lse == -torch.inf) | lse.isfinite()).all()
    return [out, lse.exp(), *grads]


def _error(actual: Tensor, expected: Tensor) -> float:
    error = float((actual.double() - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")
