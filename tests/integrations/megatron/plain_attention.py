"""A core attention for the stock MLA layer, which has none without Transformer Engine: one rank, plain softmax.

Shares no code with the library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PlainAttention"]


class PlainAttention(nn.Module):
    """Softmax attention of full score matrices, causal, with packed documents and pads between them."""

    current_max_attn_logits: Tensor | None

    def __init__(self, config: Any, *_: Any, softmax_scale: float = 1.0, **__: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.window = config.window_size
        self.current_max_attn_logits = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> Tensor:
        packed = query.ndim == 3
        q, k, v = (x.unsqueeze(1) if packed else x for x in (query, key, value))  # [s, b, h, d]
        scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * self.softmax_scale
        scores = scores.masked_fill(~self._seen(len(q), packed_seq_params), float("-inf"))
        self.current_max_attn_logits = scores.detach().amax(dim=(0, 2, 3))
        probs = scores.softmax(-1).nan_to_num(0.0)  # pads see nothing
        out = torch.einsum("bhqk,kbhd->qbhd", probs, v)
        return out.squeeze(1).flatten(1) if packed else out.flatten(2)

    def _seen(self, tokens: int, packed: Any) -> Tensor:
        place = torch.arange(tokens)
        distance = place[:, None] - place[None, :]
        seen = distance >= 0
        if self.window:
            seen &= distance <= self.window[0]
        if packed is None:
            return seen
        slots = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        lengths, padded = packed.cu_seqlens_q.diff(), slots.diff()
        document = torch.repeat_interleave(torch.arange(len(padded)), padded)
        real = place - slots[:-1][document] < lengths[document]
        return seen & (document[:, None] == document[None, :]) & real[:, None] & real[None, :]
