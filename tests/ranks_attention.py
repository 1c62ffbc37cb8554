"""Run `latent_attention` on ranks and put the parts together again: what tests of schemes share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import laga_attn as laga
from laga_attn.layout import LayoutKind, SequenceLayout
from tests.compare import assert_close
from tests.oracle import Case, Expected, make_inputs
from tests.pool import RankContext, RankGroup

__all__ = ["Local", "Run", "assembled", "assert_matches", "attend", "layout_of", "parallel", "run_on"]


@dataclass(frozen=True)
class Run:
    """How the op is called: everything that must not change the numbers."""

    scheme: str = "laga"
    ulysses_degree: int | None = None
    kind: LayoutKind = "zigzag"
    save: str = "auto"
    kernel: str = "auto"
    head_group: int | None = None
    poison_pads: bool = False
    with_dlse: bool = True
    two_level: bool = False
    overlap: bool = True


@dataclass(frozen=True)
class Local:
    """One rank's results."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dc_kv: Tensor
    dk_rope: Tensor
    dweight: Tensor


def layout_of(case: Case, run: Run, size: int) -> SequenceLayout:
    return SequenceLayout.packed(case.cu_seqlens, size, kind=run.kind)


def parallel(ctx: RankContext, run: Run) -> laga.ContextParallel:
    if ctx.size == 1:
        return laga.ContextParallel.none()
    return laga.ContextParallel(ctx.group, run.ulysses_degree, two_level=run.two_level, overlap=run.overlap)


def attend(ctx: RankContext, case: Case, run: Run) -> Local:
    """Forward and backward of one call on one rank."""
    inputs, layout = make_inputs(case), layout_of(case, run, ctx.size)
    pad = float("nan") if run.poison_pads else 0.0

    def local(t: Tensor, dim: int = 1) -> Tensor:
        return layout.shard(t.to(case.dtype), ctx.rank, dim=dim, pad_value=pad)

    leaves = [local(t).requires_grad_() for t in (inputs.q, inputs.c_kv, inputs.k_rope)]
    leaves.append(inputs.weight.to(case.dtype, copy=True).requires_grad_())
    before = [t.detach().clone() for t in leaves]
    out, lse = laga.latent_attention(
        *leaves, layout=layout, cp=parallel(ctx, run), scheme=run.scheme, qk_nope_head_dim=case.nope,
        v_head_dim=case.v, softmax_scale=case.scale, causal=case.causal, window=case.window, save=run.save,
        kernel=run.kernel, head_group=run.head_group, return_lse=True,
    )  # fmt: skip
    outputs, grads = (out,), (local(inputs.dout),)
    if run.with_dlse:
        outputs, grads = (out, lse), (*grads, local(inputs.dlse, dim=2).to(lse.dtype))
    torch.autograd.backward(outputs, grads)
    for leaf, original in zip(leaves, before, strict=True):
        assert torch.equal(leaf.detach().nan_to_num(), original.nan_to_num()), "an input was changed in place"
    return Local(out.detach(), lse.detach(), *(t.grad for t in leaves))


def assembled(parts: list[Local], case: Case, run: Run) -> Expected:
    """The whole sequence's results; also checks that pads are exactly neutral on every rank."""
    layout = layout_of(case, run, len(parts))
    for rank, part in enumerate(parts):
        pads = torch.from_numpy(layout.rows(rank) < 0)
        for name in ("out", "dq", "dc_kv", "dk_rope"):
            at_pads = getattr(part, name)[:, pads]
            assert torch.equal(at_pads, torch.zeros_like(at_pads)), f"{name} of a pad is not 0 on rank {rank}"
        assert (part.lse[:, :, pads] == float("-inf")).all()

    def whole(name: str, dim: int = 1) -> Tensor:
        return layout.unshard([getattr(part, name) for part in parts], dim=dim)

    weight = torch.stack([part.dweight for part in parts]).sum(0, dtype=parts[0].lse.dtype)
    return Expected(whole("out"), whole("lse", 2), whole("dq"), whole("dc_kv"), whole("dk_rope"), weight.to(case.dtype))


def assert_matches(actual: Expected, expected: Expected, *, rel: float, name: str = "") -> None:
    for field in ("out", "lse", "dq", "dc_kv", "dk_rope", "dweight"):
        assert_close(getattr(actual, field), getattr(expected, field), rel=rel, name=f"{name} {field}")


def run_on(ranks: RankGroup, case: Case, run: Run) -> Expected:
    return assembled(ranks.run(attend, case, run), case, run)
