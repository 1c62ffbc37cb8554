"""The three schemes as plain eager code, score matrices kept: what published memory figures were measured with.

Nothing here is fast or careful. One MLA layer in which each of P ranks holds S / P tokens; queries and outputs are
exchanged by heads over all ranks, so that a rank attends with H / P heads to the whole sequence. Autograd does the
backward pass, softmax runs in the dtype of its input, and the causal mask is a matrix of booleans that is filled in in
place. `laga-attn plan --paper` traces these forms on tensors without data.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laga_attn.config import MLAConfig

__all__ = ["FORMS", "EagerLayer"]

FORMS = ("explicit", "absorbed", "laga")

# Newer names, and older ones that warn where both exist.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Exchange(torch.autograd.Function):
    """Ulysses' all-to-all: `[S / P, H, D]` to `[S, H / P, D]`, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool) -> Tensor:
        ctx.to_heads = to_heads
        return _exchange(x, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, not ctx.to_heads), None


def _exchange(x: Tensor, to_heads: bool) -> Tensor:
    ranks = dist.get_world_size()
    send = torch.cat(x.chunk(ranks, dim=1), dim=0) if to_heads else x.contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    return received if to_heads else torch.cat(received.chunk(ranks, dim=0), dim=1)


class _Gather(torch.autograd.Function):
    """All-gather along the sequence; the gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gathered = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
        _all_gather(gathered, x.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        part = grad.new_empty(grad.shape[0] // dist.get_world_size(), *grad.shape[1:])
        _reduce_scatter(part, grad.contiguous())
        return part


class EagerLayer(nn.Module):
    """One MLA layer on one rank of the default process group.

    Args:
        cfg: sizes. RoPE is left out: it moves no bytes and keeps next to none.
        form: one of `FORMS`.
    """

    def __init__(self, cfg: MLAConfig, form: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.cfg, self.form = cfg, form

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

        heads = cfg.num_attention_heads
        query_width = cfg.q_lora_rank or cfg.hidden_size
        self.q_a_proj = linear(cfg.hidden_size, cfg.q_lora_rank) if cfg.q_lora_rank else nn.Identity()
        self.q_b_proj = linear(query_width, heads * cfg.qk_head_dim)
        self.kv_a_proj = linear(cfg.hidden_size, cfg.kv_lora_rank + cfg.qk_rope_head_dim)
        self.kv_b_proj = linear(cfg.kv_lora_rank, heads * (cfg.qk_nope_head_dim + cfg.v_head_dim))
        self.o_proj = linear(heads * cfg.v_head_dim, cfg.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[S / P, hidden_size]` to the same."""
        cfg, heads = self.cfg, self.cfg.num_attention_heads
        q = self.q_b_proj(self.q_a_proj(hidden)).view(-1, heads, cfg.qk_head_dim)
        c_kv, k_rope = self.kv_a_proj(hidden).split([cfg.kv_lora_rank, cfg.qk_rope_head_dim], dim=-1)
        attend = {"explicit": self._explicit, "absorbed": self._absorbed, "laga": self._laga}[self.form]
        out = attend(_Exchange.apply(q, True), c_kv, k_rope)  # [S, H / P, v]
        return self.o_proj(_Exchange.apply(out, False).flatten(1))

    def _explicit(self, q: Tensor, c_kv: Tensor, k_rope: Tensor) -> Tensor:
        k, v = self._keys_and_values(self.kv_b_proj.weight, c_kv, k_rope)
        return _attention(q, _Exchange.apply(k, True), _Exchange.apply(v, True))

    def _laga(self, q: Tensor, c_kv: Tensor, k_rope: Tensor) -> Tensor:
        c_kv, k_rope = _Gather.apply(c_kv), _Gather.apply(k_rope)
        return _attention(q, *self._keys_and_values(self._own_weight(), c_kv, k_rope))

    def _absorbed(self, q: Tensor, c_kv: Tensor, k_rope: Tensor) -> Tensor:
        cfg = self.cfg
        c_kv, k_rope = _Gather.apply(c_kv), _Gather.apply(k_rope)
        q_nope, q_rope = q.split([cfg.qk_nope_head_dim, cfg.qk_rope_head_dim], dim=-1)
        weight = self._own_weight().view(-1, cfg.qk_nope_head_dim + cfg.v_head_dim, cfg.kv_lora_rank)
        q_latent = torch.einsum("shd,hdc->hsc", q_nope, weight[:, : cfg.qk_nope_head_dim])
        content = q_latent @ c_kv.t()  # [H / P, S, S]
        position = q_rope.transpose(0, 1) @ k_rope.t()
        scores = _mask((content + position) * cfg.qk_head_dim**-0.5)
        latent_out = scores.softmax(dim=-1) @ c_kv
        return torch.einsum("hsc,hdc->shd", latent_out, weight[:, cfg.qk_nope_head_dim :])

    def _own_weight(self) -> Tensor:
        """The rows of `kv_b_proj.weight` of this rank's heads."""
        return self.kv_b_proj.weight.chunk(dist.get_world_size())[dist.get_rank()]

    def _keys_and_values(self, weight: Tensor, c_kv: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        cfg = self.cfg
        kv = (c_kv @ weight.t()).unflatten(-1, (-1, cfg.qk_nope_head_dim + cfg.v_head_dim))
        k_nope, v = kv.split([cfg.qk_nope_head_dim, cfg.v_head_dim], dim=-1)
        return torch.cat([k_nope, k_rope[:, None].expand(-1, kv.shape[1], -1)], dim=-1), v


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[S, h, D]` each; scores and probabilities exist in full."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [h, S, D]
    scores = _mask(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5)
    return (scores.softmax(dim=-1) @ v).transpose(0, 1)


def _mask(scores: Tensor) -> Tensor:
    """Hide later keys from each query of `[h, S, S]`, in place."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill_(hidden, -torch.inf)
