"""Attention on one rank: kernels over spans, and the table that chooses among them."""

from __future__ import annotations

from laga_attn.kernels.merge import merge_partials
from laga_attn.kernels.table import TABLE, Kernel, KernelName, select, support_table

__all__ = ["TABLE", "Kernel", "KernelName", "merge_partials", "select", "support_table"]
