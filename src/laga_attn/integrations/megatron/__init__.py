"""Latent attention for the MLA models of Megatron-Core: one line in the layer spec.

spec = laga.megatron.with_laga(spec, scheme="laga")
"""

from __future__ import annotations

from laga_attn.integrations.megatron import features  # noqa: F401  (first: it explains a missing Megatron)
from laga_attn.integrations.megatron.refusals import support_table
from laga_attn.integrations.megatron.spec import with_laga

__all__ = ["support_table", "with_laga"]
