"""`latent_attention`: validate, agree, plan, dispatch."""

from __future__ import annotations

from typing import Final, Literal, cast, overload

import torch
from torch import Tensor

from laga_attn.agreement import agree
from laga_attn.attention_plan import SAVE_POLICIES, AttentionPlan, LatentDims, Save, streams
from laga_attn.checks import Call, autocast, check_call, effective_window
from laga_attn.grid import ContextParallel
from laga_attn.kernels import KernelName
from laga_attn.layout import SequenceLayout
from laga_attn.prefetch import LatentGather
from laga_attn.schemes.function import LatentAttentionFunction

__all__ = ["latent_attention"]

_REBUILD_BUDGET: Final = 2**28
"""Bytes that the K and V of one head group may take by default: enough for full-speed GEMMs, small beside a layer."""

_GROUP_ROWS: Final = 2048
"""A rank's tokens times heads in a group, at least: below, messages and calls cost more than overlap hides."""


@overload
def latent_attention(
    q: Tensor, c_kv: Tensor, k_rope: Tensor, kv_b_weight: Tensor, *, layout: SequenceLayout,
    cp: ContextParallel | None = ...,
    scheme: str = ..., qk_nope_head_dim: int, v_head_dim: int, softmax_scale: float | None = ..., causal: bool = ...,
    window: int | None = ..., save: str = ..., kernel: KernelName = ..., head_group: int | None = ...,
    return_lse: Literal[False] = ..., prefetched: LatentGather | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def latent_attention(
    q: Tensor, c_kv: Tensor, k_rope: Tensor, kv_b_weight: Tensor, *, layout: SequenceLayout,
    cp: ContextParallel | None = ...,
    scheme: str = ..., qk_nope_head_dim: int, v_head_dim: int, softmax_scale: float | None = ..., causal: bool = ...,
    window: int | None = ..., save: str = ..., kernel: KernelName = ..., head_group: int | None = ...,
    return_lse: Literal[True], prefetched: LatentGather | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def latent_attention(
    q: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    kv_b_weight: Tensor,
    *,
    layout: SequenceLayout,
    cp: ContextParallel | None = None,
    scheme: str = "laga",
    qk_nope_head_dim: int,
    v_head_dim: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    save: str = "auto",
    kernel: KernelName = "auto",
    head_group: int | None = None,
    return_lse: bool = False,
    prefetched: LatentGather | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head Latent Attention over a sequence that is split over the ranks of `cp`.

    Each rank passes what it computed for its own tokens and gets the attention output for them. Gradients of `q`,
    `c_kv` and `k_rope` are complete; the gradient of `kv_b_weight` is this rank's part of a sum over the ranks (as
    every weight's is when tokens are split), so sum parameter gradients over `cp`.

    Args:
        q: `[B, s, H, nope + rope]`, rope part rotated. s is `layout.local_len`.
        c_kv: `[B, s, kv_lora_rank]`, the latent after `kv_a_layernorm`.
        k_rope: `[B, s, rope]`, the shared key part after rotation.
        kv_b_weight: `[H * (nope + v), kv_lora_rank]`: `kv_b_proj.weight`, per head first the nope rows, then v.
        layout: who holds which token; built for as many ranks as `cp` has. Packed layouts need B = 1.
        cp: the ranks; None or `ContextParallel.none()` for one process. All tensors share one dtype (fp64, fp32,
            bf16 or fp16) and device; under autocast they are cast to the autocast dtype first.
        scheme: `"laga"`, `"explicit"`, `"absorbed"`, or `"auto"`: the cheapest by the rule of `laga_attn.auto`, which
            also chooses the Ulysses degree where `cp` leaves it open.
        qk_nope_head_dim: width of a head's un-rotated query/key part.
        v_head_dim: width of a head's value.
        softmax_scale: factor on scores; None: `1 / sqrt(nope + rope)`. YaRN models need `MLAConfig.softmax_scale`.
        causal: a token sees itself and earlier tokens of its document; False: its whole document.
        window: with `causal`, a token sees at most this many tokens, itself included; None: no limit.
        save: what is kept for backward. `"latent"`: the local latent, gathered and rebuilt again; `"gathered"`: also
            the gathered latent; `"kv"`: also K and V. `"auto"`: `"kv"` for explicit (which has no `"gathered"`),
            else `"latent"`.
        kernel: `"auto"`, or a name from `laga_attn.kernels.support_table`.
        head_group: heads whose K and V are rebuilt at a time; None: an eighth of the rank's heads, but one for each
            thread on a CPU, where threads share a group's heads, and more of few tokens (2048 of a rank's tokens times
            heads); fewer where their K and V would take more than 256 MiB (a kernel that rebuilds K and V a few rows
            at a time needs no room for them).
        return_lse: also return the log-sum-exp of the scaled scores.
        prefetched: the gather of these latents, started earlier by `prefetch_latent`.

    Returns:
        `out [B, s, H, v]` in the dtype of `q`; with `return_lse` also `lse [B, H, s]` in fp32 (fp64 for fp64),
        natural log. Pads give out 0, lse -inf and zero gradients, whatever they contain.

    Raises:
        ValueError: arguments that do not fit, or that differ between ranks: on every rank, before data moves.
    """
    cp = ContextParallel.none() if cp is None else cp
    own_gather = prefetched is None or prefetched.is_of(c_kv, k_rope)
    q, c_kv, k_rope, kv_b_weight = autocast(q, c_kv, k_rope, kv_b_weight)
    call = Call(
        q=q, c_kv=c_kv, k_rope=k_rope, weight=kv_b_weight, layout=layout, cp=cp, scheme=scheme,
        qk_nope_head_dim=qk_nope_head_dim, v_head_dim=v_head_dim, softmax_scale=softmax_scale, causal=causal,
        window=effective_window(window, layout), save=save, kernel=kernel, head_group=head_group, return_lse=return_lse,
        prefetched=prefetched, own_gather=own_gather,
    )  # fmt: skip
    out, lse = _run(call)
    return (out, lse) if return_lse else out


# Collectives and their plan are not for a graph compiler; the kernels are operators of their own.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(call: Call) -> tuple[Tensor, Tensor]:
    agree(call.cp, call.signature(), check_call(call))
    started = call.prefetched.segments if call.prefetched else None
    # torch leaves apply() untyped.
    result = LatentAttentionFunction.apply(  # type: ignore[no-untyped-call]
        *call.tensors().values(), _plan(call), call.cp, started
    )
    return cast(tuple[Tensor, Tensor], result)


def _plan(call: Call) -> AttentionPlan:
    dims, cp = call.dims(), call.cp
    scheme, degree = call.resolve()
    routing = call.routing()
    save = SAVE_POLICIES[scheme][0] if call.save == "auto" else cast(Save, call.save)
    kernel = call.select_kernel()
    # What head groups follow is equal on all ranks, unlike the keys that this one sees: exchanges go by group.
    rebuilt = 0 if streams(scheme, save, kernel, dims) else call.layout.seq_len
    return AttentionPlan(
        scheme=scheme,
        save=save,
        ulysses_degree=degree,
        rank=cp.rank,
        dims=dims,
        routing=routing,
        kernel=kernel,
        softmax_scale=dims.qk_head_dim**-0.5 if call.softmax_scale is None else call.softmax_scale,
        head_group=call.head_group or _default_head_group(call, dims, degree, rebuilt),
        return_lse=call.return_lse,
        keeps=bool(call.wanted_gradients()),
    )


def _default_head_group(call: Call, dims: LatentDims, ulysses_degree: int, rebuilt: int) -> int:
    """Heads of a group, each of which rebuilds K and V of so many tokens."""
    heads, batch = dims.num_heads // ulysses_degree, call.q.shape[0]
    worth_a_message = -(-_GROUP_ROWS // max(1, call.layout.local_len * batch))
    at_once = min(heads, max(heads // 8, call.threads, worth_a_message))
    per_head = max(1, rebuilt * batch * dims.kv_head_dim * call.q.element_size())
    return max(1, min(at_once, _REBUILD_BUDGET // per_head))
