"""Attention over keys that come block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from laga_attn.kernels import merge_partials
from laga_attn.movement import acc_dtype

__all__ = ["RunningAttention"]


class RunningAttention:
    """Output and log-sum-exp of the blocks so far, kept in the accumulation dtype once there is more than one.

    Args:
        rows, heads, width: of the output, `[1, rows, heads, width]`.
        like: a tensor of the dtype and device of the queries.
    """

    def __init__(self, rows: int, heads: int, width: int, like: Tensor) -> None:
        self._shape = (1, rows, heads, width)
        self._like = like
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: slice, heads: slice, out: Tensor, lse: Tensor) -> None:
        """Merge attention of some rows and heads over keys that are new to them.

        Args:
            rows, heads: which.
            out: `[1, rows, heads, width]`.
            lse: `[1, heads, rows]`; -inf where no key is visible.
        """
        if self._out is None and out.shape == self._shape:
            self._out, self._lse = out, lse  # nothing to merge with, and often nothing will come
            return
        total, total_lse = self._totals()
        total[:, rows, heads], total_lse[:, heads, rows] = merge_partials(
            total[:, rows, heads], total_lse[:, heads, rows], out, lse
        )

    def result(self) -> tuple[Tensor, Tensor]:
        """Output `[1, rows, heads, width]` and log-sum-exp `[1, heads, rows]`; 0 and -inf for rows without a key."""
        if self._out is not None and self._lse is not None:
            return self._out, self._lse
        return self._totals()

    def _totals(self) -> tuple[Tensor, Tensor]:
        acc = acc_dtype(self._like.dtype)
        _, rows, heads, _ = self._shape
        if self._out is None or self._lse is None:
            self._out = self._like.new_zeros(self._shape, dtype=acc)
            self._lse = self._like.new_full((1, heads, rows), -torch.inf, dtype=acc)
        self._out = self._out.to(acc)
        return self._out, self._lse
