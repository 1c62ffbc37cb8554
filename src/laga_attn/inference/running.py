"""Attention over keys that come block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from laga_attn.kernels import merge_partials
from laga_attn.movement import acc_dtype

__all__ = ["RunningAttention"]


class RunningAttention:
    """Output and log-sum-exp over the blocks so far; in the accumulation dtype once there is something to merge.

    Args:
        out: `[B, rows, heads, width]` over the first block; changed in place.
        lse: `[B, heads, rows]`; -inf where no key was visible.
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out = out
        self.lse = lse

    @classmethod
    def nothing(cls, batch: int, rows: int, heads: int, width: int, like: Tensor) -> RunningAttention:
        """Before the first block: output 0 and log-sum-exp -inf."""
        acc = acc_dtype(like.dtype)
        out = like.new_zeros((batch, rows, heads, width), dtype=acc)
        return cls(out, like.new_full((batch, heads, rows), -torch.inf, dtype=acc))

    def add(self, rows: slice, heads: slice, out: Tensor, lse: Tensor) -> None:
        """Merge attention of some rows and heads, shaped like theirs, over keys that are new to them."""
        self.out = self.out.to(self.lse.dtype)
        self.out[:, rows, heads], self.lse[:, heads, rows] = merge_partials(
            self.out[:, rows, heads], self.lse[:, heads, rows], out, lse
        )
