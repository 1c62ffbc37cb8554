"""Latent attention for the MLA models of Megatron-Core, by one line in the layer spec:

    spec = laga.megatron.with_laga(spec, scheme="laga")

Weights, checkpoints, parallel sizes and arguments stay what they are.
"""

from __future__ import annotations

from laga_attn.integrations.megatron import features  # noqa: F401  (first: it explains a missing Megatron)
from laga_attn.integrations.megatron.config import config_from_megatron, config_to_megatron
from laga_attn.integrations.megatron.refusals import support_table
from laga_attn.integrations.megatron.spec import with_laga
from laga_attn.integrations.megatron.verify import Verification, verify

__all__ = ["Verification", "config_from_megatron", "config_to_megatron", "support_table", "verify", "with_laga"]
