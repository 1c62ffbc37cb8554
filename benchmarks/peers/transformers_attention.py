"""What `DeepseekV3Attention` of HF Transformers offers on a CPU: two attention functions, and the layer itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.peers.ulysses import LocalAttention
from torch import Tensor, nn

from laga_attn.bench.grid import Cell

__all__ = ["eager", "layer", "sdpa"]

_LAYER = SimpleNamespace(num_key_value_groups=1, is_causal=True, training=False)
"""What the functions ask of the layer that calls them."""


def eager(cell: Cell) -> LocalAttention:
    """`eager_attention_forward` of its DeepSeek-V3 model, with the mask that the model makes once for all layers."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import eager_attention_forward

    mask = torch.full((cell.seq_len, cell.seq_len), -torch.inf).triu_(1)[None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _call(eager_attention_forward, q, k, v, mask.to(q.dtype))

    return attend


def sdpa(cell: Cell) -> LocalAttention:
    """`sdpa_attention_forward`, to which its models give no mask where attention is plainly causal."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return lambda q, k, v: _call(sdpa_attention_forward, q, k, v, None)


def _call(function: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out: Tensor = function(_LAYER, *heads_first, mask, scaling=q.shape[-1] ** -0.5)[0]
    return out


def layer(hf_config: dict[str, Any], implementation: str, dtype: torch.dtype) -> nn.Module:
    """`DeepseekV3Attention` with random weights."""
    from transformers import AutoConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config = AutoConfig.for_model(**hf_config)
    config._attn_implementation = implementation
    return DeepseekV3Attention(config, layer_idx=0).to(dtype)
