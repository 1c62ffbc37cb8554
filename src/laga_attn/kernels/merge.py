"""Merging partial attention results over disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge_partials"]


def merge_partials(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys into attention over their union.

    With ``w = exp(lse_a - lse)`` and ``lse = log(exp(lse_a) + exp(lse_b))`` the merged output is
    ``w * out_a + (1 - w) * out_b``. A side that saw no key has LSE -inf by this library's convention and +inf
    by that of some fused kernels; both count as weight 0, and its output is then ignored even where it holds
    NaN.

    Args:
        out_a, out_b: [B, Sq, H, Dv], one dtype.
        lse_a, lse_b: [B, H, Sq], float32 or float64, natural log.

    Returns:
        Output in the dtype of ``out_a``, and LSE: a row that neither side saw has output 0 and LSE -inf.
    """
    empty = lse_a.new_full((), -torch.inf)
    lse_a = torch.where(lse_a == torch.inf, empty, lse_a)
    lse_b = torch.where(lse_b == torch.inf, empty, lse_b)
    lse = torch.logaddexp(lse_a, lse_b)  # [B, H, Sq]; -inf only where both are
    # A finite stand-in keeps exp(-inf - -inf) from becoming NaN: both weights are then exp(-inf) = 0.
    top = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    merged = _weighted(out_a, lse_a, top) + _weighted(out_b, lse_b, top)
    return merged.to(out_a.dtype), lse


def _weighted(out: Tensor, lse: Tensor, top: Tensor) -> Tensor:
    weight = torch.exp(lse - top).transpose(1, 2).unsqueeze(-1)  # [B, Sq, H, 1]
    return torch.where(weight == 0, torch.zeros_like(weight), weight * out)  # 0 * NaN would be NaN
