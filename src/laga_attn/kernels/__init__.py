"""Attention on one rank: kernels over spans, and the table that chooses among them."""

from __future__ import annotations

from laga_attn.kernels.merge import merge_partials
from laga_attn.kernels.table import TABLE, Kernel, KernelName, kernels_here, select, support_table

__all__ = ["TABLE", "Kernel", "KernelName", "kernels_here", "merge_partials", "select", "support_table"]
