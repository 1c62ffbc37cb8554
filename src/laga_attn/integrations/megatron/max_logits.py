"""The largest attention logit per head, which QK-clip needs (MuonClip, arXiv 2507.20534, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from laga_attn.attention_plan import LatentDims
from laga_attn.grid import ContextParallel
from laga_attn.layout import SequenceLayout, Span
from laga_attn.movement import acc_dtype, gather_keys, take
from laga_attn.routing import route_tokens
from laga_attn.schemes.latent import expand_kv, join_latent, weight_rows

__all__ = ["max_attention_logits"]

_TILE = 1024  # queries whose scores exist at a time, per head


@torch.no_grad()
def max_attention_logits(
    q: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    *,
    layout: SequenceLayout,
    cp: ContextParallel,
    dims: LatentDims,
    softmax_scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """`[H]` largest scaled score that any of this rank's queries has with a key that it sees; -inf without any.

    Attention itself never keeps a score, so this pass gathers the latent and computes the scores once more.
    Arguments are those of `latent_attention`.
    """
    routing = route_tokens(layout, cp.rank, 1, causal, window)
    own = join_latent(c_kv, k_rope, routing)
    latent = gather_keys(own, routing.keys.routes, cp, "latent", "forward")()  # [keys, B, r + dr]
    queries = take(q.transpose(0, 1), routing.real)  # [n, B, H, D]
    largest = q.new_full((dims.num_heads,), float("-inf"), dtype=acc_dtype(q.dtype))
    for head in range(dims.num_heads):
        rows = weight_rows(slice(head, head + 1), dims)
        keys = expand_kv(latent, weight[rows], dims)[:, :, 0, : dims.qk_head_dim]  # [keys, B, D]
        for span in routing.keys.spans:
            for first in range(0, span.q_len, _TILE):
                tile = slice(first, min(first + _TILE, span.q_len))
                largest[head] = torch.maximum(largest[head], _largest(queries[:, :, head], keys, span, tile))
    return largest * softmax_scale


def _largest(queries: Tensor, keys: Tensor, span: Span, tile: slice) -> Tensor:
    """Largest visible `q . k` of some queries of a span, 0-d."""
    q = queries[span.q_start + tile.start : span.q_start + tile.stop].transpose(0, 1)  # [B, tile, D]
    k = keys[span.k_start : span.k_start + span.k_len].transpose(0, 1)  # [B, k_len, D]
    scores = (q @ k.mT).to(acc_dtype(q.dtype))
    if span.causal:
        place = torch.arange(tile.start, tile.stop, device=q.device) + span.k_len - span.q_len
        distance = place[:, None] - torch.arange(span.k_len, device=q.device)
        hidden = distance < 0 if span.window is None else (distance < 0) | (distance >= span.window)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.amax()
