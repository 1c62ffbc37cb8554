"""Explicit: every head's K and V are built where their tokens live and sent over the network.

At `ulysses_degree = P` this is Ulysses (arXiv 2309.14509; Megatron-Core's `cp_comm_type="a2a"`), at 1 it is a
gather of all K and V (`"all_gather"`). It is the training path of today's systems and the yardstick here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laga_attn.attention_plan import AttentionPlan
from laga_attn.grid import ContextParallel
from laga_attn.movement import acc_dtype, add_rows, cut_key_grads, gather_keys, return_key_grads
from laga_attn.schemes.interface import Grads, Kept, Latents, Needs
from laga_attn.schemes.latent import expand_kv, fold_kv_grads, join_latent, split_kv, split_latent_grad, weight_rows
from laga_attn.schemes.queries import OutputReturn, QueryGradReturn, send_output_grads, send_queries
from laga_attn.traffic import Phase

__all__ = ["backward", "forward"]


def forward(
    q: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    plan: AttentionPlan,
    cp: ContextParallel,
    prefetched: Latents | None = None,
) -> tuple[Tensor, Tensor | None, Kept]:
    """Shapes as in `latent_attention`; `save="kv"` keeps the K and V that were attended to."""
    assert prefetched is None  # no latent travels here; refused where it is asked for
    all_heads = slice(0, plan.num_own_heads)
    (finish_query,) = send_queries(q, [all_heads], plan, cp)
    kv = _exchange_kv(c_kv, k_rope, weight, plan, cp, "forward")  # [keys, B, h, Dqk + Dv]
    query = finish_query()
    k, v = split_kv(kv, plan.dims)
    out, lse = plan.kernel.forward(query, k, v, plan.routing.keys.spans, plan.softmax_scale)
    returning = OutputReturn(q, plan, cp)
    returning.start(all_heads, out, lse)
    local_out, local_lse = returning.finish()
    kept_kv = kv if plan.save == "kv" else None
    return local_out, local_lse, (query, local_out, lse, c_kv, k_rope, weight, kept_kv)


def backward(
    dout: Tensor, dlse: Tensor | None, kept: Kept, needs: Needs, plan: AttentionPlan, cp: ContextParallel
) -> Grads:
    """dK and dV go home and are folded into the latent and the weight there."""
    query, out, lse, c_kv, k_rope, weight, kv = kept
    all_heads = slice(0, plan.num_own_heads)
    (finish_dout,) = send_output_grads(dout, dlse, out, [all_heads], plan, cp)
    if kv is None:
        kv = _exchange_kv(c_kv, k_rope, weight, plan, cp, "backward")
    own_dout, delta = finish_dout()
    k, v = split_kv(kv, plan.dims)
    dq, dk, dv = plan.kernel.backward(own_dout, delta, query, k, v, lse, plan.routing.keys.spans, plan.softmax_scale)
    del own_dout, kv, k, v
    returning = QueryGradReturn(dout, plan, cp) if needs.query else None
    if returning:
        returning.add(all_heads, dq)
    del dq
    d_c_kv, d_k_rope, d_weight = None, None, None
    if needs.latent or needs.weight:
        dkv = torch.cat([dk, dv], dim=-1).transpose(0, 1)  # [keys, B, h, Dqk + Dv]
        del dk, dv
        pieces = cut_key_grads(dkv, plan.routing.keys.routes, c_kv.dtype)
        del dkv
        contributions = return_key_grads(pieces, plan.routing.keys.routes, cp, "key_value_grad", "backward")
        del pieces
        d_c_kv, d_k_rope, d_weight = _fold(_sum_by_heads(contributions(), plan), c_kv, k_rope, weight, plan)
    return Grads(
        returning.finish() if returning else None,
        d_c_kv if needs.latent else None,
        d_k_rope if needs.latent else None,
        d_weight if needs.weight else None,
    )


def _exchange_kv(
    c_kv: Tensor, k_rope: Tensor, weight: Tensor, plan: AttentionPlan, cp: ContextParallel, phase: Phase
) -> Tensor:
    """K and V of all heads of the rank's own tokens out, those of its own heads for all visible tokens in."""
    local = expand_kv(join_latent(c_kv, k_rope, plan.routing), weight, plan.dims)  # [n, B, H, Dqk + Dv]
    pieces = local if plan.ulysses_degree == 1 else [local[:, :, plan.heads_of(p)] for p in range(cp.size)]
    return gather_keys(pieces, plan.routing.keys.routes, cp, "key_value", phase)()


def _sum_by_heads(contributions: list[Tensor], plan: AttentionPlan) -> Tensor:
    """Each peer sends the gradient for its own heads: join over members, add over Ulysses groups in rank order."""
    routing, dims = plan.routing, plan.dims
    first = contributions[0]
    one_group = len(contributions) == plan.ulysses_degree  # nothing to add, so nothing to widen
    total = first.new_zeros(
        routing.real_len, first.shape[1], dims.num_heads, dims.kv_head_dim,
        dtype=first.dtype if one_group else acc_dtype(first.dtype),
    )  # fmt: skip
    for peer, part in enumerate(contributions):
        add_rows(total[:, :, plan.heads_of(peer)], plan.routing.keys.routes[0].send[peer], part)
    return total.to(first.dtype)


def _fold(
    dkv: Tensor, c_kv: Tensor, k_rope: Tensor, weight: Tensor, plan: AttentionPlan
) -> tuple[Tensor, Tensor, Tensor]:
    dims = plan.dims
    latent = join_latent(c_kv, k_rope, plan.routing)
    d_latent = latent.new_zeros(latent.shape, dtype=acc_dtype(latent.dtype))
    d_weight = torch.empty_like(weight)
    for group in plan.all_head_groups():
        rows = weight_rows(group, dims)
        dk, dv = dkv[:, :, group].split([dims.qk_head_dim, dims.v_head_dim], dim=-1)
        d_weight[rows] = fold_kv_grads(dk, dv, latent, weight[rows], dims, d_latent)
    return (*split_latent_grad(d_latent, plan, c_kv.dtype), d_weight)
