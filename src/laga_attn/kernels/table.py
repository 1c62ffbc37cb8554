"""The support table: which attention kernel can compute what, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

import laga_attn.kernels.blockwise
import laga_attn.kernels.reference
import laga_attn.kernels.sdpa  # noqa: F401  (importing a kernel registers its operators)
from laga_attn.kernels import avx512, cudnn, flash
from laga_attn.kernels.problem import (
    check_backward,
    check_backward_from_latent,
    check_forward,
    check_forward_from_latent,
)
from laga_attn.kernels.support import (
    ANY_DIMS,
    CUDNN_DIMS,
    EQUAL_DIMS,
    EVEN_DIMS,
    FLASH3_DIMS,
    FLASH4_DIMS,
    MULTIPLES_OF_8,
    Case,
    Support,
)
from laga_attn.spans import Span, pack_spans

__all__ = ["TABLE", "Kernel", "KernelName", "kernels_here", "select", "support_table"]

KernelName = Literal["auto", "avx512", "blockwise", "cudnn", "flash3", "flash4", "reference", "sdpa"]
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HALF = (torch.bfloat16, torch.float16)


# In order of preference: "auto" takes the first row that accepts the case.
TABLE: tuple[Support, ...] = (
    Support(
        "flash3",
        ("cuda",),
        _HALF,
        FLASH3_DIMS,
        True,
        False,
        "FlashAttention 3",
        flash.missing_flash3,
        lse_gradient=False,
    ),
    Support("flash4", ("cuda",), _HALF, FLASH4_DIMS, True, False, "FlashAttention 4", flash.missing_flash4),
    Support(
        "cudnn",
        ("cuda",),
        _HALF,
        CUDNN_DIMS,
        False,
        False,
        "cuDNN attention through torch",
        cudnn.missing,
        lse_gradient=False,
    ),
    Support("sdpa", ("cuda",), _DTYPES[1:], MULTIPLES_OF_8, False, False, "torch memory-efficient attention"),
    Support(
        "avx512",
        ("cpu",),
        (torch.float32, torch.bfloat16),
        EVEN_DIMS,
        True,
        True,
        "compiled blockwise attention, also straight from latents",
        avx512.missing,
    ),
    Support("blockwise", (), _DTYPES, ANY_DIMS, True, True, "matrix products and online softmax, tile by tile"),
    Support("sdpa", ("cpu",), _DTYPES, EQUAL_DIMS, False, False, "torch flash attention for CPU"),
    Support("reference", (), _DTYPES, ANY_DIMS, True, True, "plain formulas with full score matrices"),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel: forward and backward over spans, as PyTorch operators."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend every query to the keys that its span shows it.

        Args:
            q: [B, Sq, h, Dqk].
            k: [B, Sk, hk, Dqk] and v: [B, Sk, hk, Dv], with hk == h, or hk == 1 for one head shared by all.
                Any strides with a contiguous last dim; both may be views of one buffer.
            v: see k.
            spans: query ranges are disjoint; key ranges may overlap. Rows in no span may hold anything, NaN
            included.
            softmax_scale: factor on the scores before softmax.

        Returns:
            out [B, Sq, h, Dv] in the dtype of q, stored sequence-first, and lse [B, h, Sq], natural log, in
            float32 (float64 for float64 inputs). A query that sees no key has out 0 and lse -inf.

        Raises:
            ValueError: shapes, dtypes, devices or spans that do not fit together.
        """
        check_forward(q, k, v, spans)
        op = getattr(torch.ops.laga_attn, f"{self.name}_forward")
        return cast(tuple[Tensor, Tensor], op(q, k, v, pack_spans(spans), softmax_scale))

    def backward(
        self,
        dout: Tensor,
        delta: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        spans: Sequence[Span],
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of :meth:`forward`, with the probabilities recomputed from ``lse``.

        Args:
            dout: [B, Sq, h, Dv], gradient of out.
            delta: [B, h, Sq] in the dtype of lse: sum(dout * out) over the head dim, minus the gradient of
            lse if any.
            q: as in the forward call, like k, v, spans and softmax_scale.
            k: see q.
            v: see q.
            lse: [B, h, Sq] from the forward call, or merged over more keys than these: the gradients are then
                these keys' share.
            spans: see q.
            softmax_scale: see q.

        Returns:
            dq, dk, dv in the dtype of q, stored sequence-first; with a shared key/value head under more than
            one query head, dk and dv are sums over heads in the dtype of lse.

        Raises:
            ValueError: shapes, dtypes, devices or spans that do not fit together.
        """
        check_backward(dout, delta, q, k, v, lse, spans)
        op = getattr(torch.ops.laga_attn, f"{self.name}_backward")
        grads = op(dout, delta, q, k, v, lse, pack_spans(spans), softmax_scale)
        return cast(tuple[Tensor, Tensor, Tensor], grads)

    def rebuilds(self, kv_lora_rank: int) -> bool:
        """Whether there is :meth:`forward_from_latent` and its backward, for latents of this rank."""
        return self.name == "avx512" and kv_lora_rank % 2 == 0

    def forward_from_latent(
        self, q: Tensor, latent: Tensor, weight: Tensor, spans: Sequence[Span], softmax_scale: float, v_head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """:meth:`forward` without keys and values in memory: rows of them are rebuilt where they are used.

        Args:
            q: [B, Sq, h, nope + rope].
            latent: [B, Sk, rank + rope], the normalised latent beside the rotated key part.
            weight: [h * (nope + v_head_dim), rank]: the rows of ``kv_b_weight`` of these heads.
            spans: as in :meth:`forward`, like softmax_scale and what is returned.
            softmax_scale: see spans.
            v_head_dim: head dim of values.

        Raises:
            ValueError: shapes, dtypes, devices, strides or spans that do not fit together.
        """
        check_forward_from_latent(q, latent, weight, spans, v_head_dim)
        op = getattr(torch.ops.laga_attn, f"{self.name}_forward_from_latent")
        return cast(tuple[Tensor, Tensor], op(q, latent, weight, pack_spans(spans), softmax_scale, v_head_dim))

    def backward_from_latent(
        self,
        dout: Tensor,
        delta: Tensor,
        q: Tensor,
        latent: Tensor,
        weight: Tensor,
        lse: Tensor,
        spans: Sequence[Span],
        softmax_scale: float,
        d_latent: Tensor | None,
        d_weight: Tensor | None,
    ) -> Tensor:
        """:meth:`backward` without keys and values, or their gradients, in memory.

        Args:
            dout: as in :meth:`backward`, like delta, lse, spans and softmax_scale.
            delta: see dout.
            q: as in :meth:`forward_from_latent`, like latent and weight.
            latent: see q.
            weight: see q.
            lse: see dout.
            spans: see dout.
            softmax_scale: see dout.
            d_latent: like latent in the dtype of lse; the gradient of the latents, a sum over heads, is added to it,
                unless it is None.
            d_weight: like weight in the dtype of lse; its gradient is added to it, unless it is None.

        Returns:
            dq.

        Raises:
            ValueError: shapes, dtypes, devices, strides or spans that do not fit together.
        """
        check_backward_from_latent(dout, delta, q, latent, weight, lse, spans, d_latent, d_weight)
        op = getattr(torch.ops.laga_attn, f"{self.name}_backward_from_latent")
        dq = op(dout, delta, q, latent, weight, lse, pack_spans(spans), softmax_scale, d_latent, d_weight)
        return cast(Tensor, dq)


def select(
    name: KernelName,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    qk_head_dim: int,
    v_head_dim: int,
    window: bool = False,
    shared_kv: bool = False,
    lse_gradient: bool = False,
) -> Kernel:
    """Choose the kernel for a case: the named one, or the best that can compute it for ``"auto"``.

    Args:
        name: "auto", or the name of a row of the table.
        device: where the tensors are.
        dtype: their dtype.
        qk_head_dim: head dim of queries and keys.
        v_head_dim: head dim of values.
        window: whether a span has a sliding window.
        shared_kv: whether one key/value head serves all query heads.
        lse_gradient: whether the LSE may get a gradient.

    Raises:
        ValueError: an unknown name, or no row of the table accepts the case; the message lists every reason.
    """
    names = ("auto", *dict.fromkeys(row.name for row in TABLE))
    if name not in names:
        raise ValueError(f"unknown kernel {name!r}: choose one of {', '.join(names)}")
    case = Case(torch.device(device).type, dtype, qk_head_dim, v_head_dim, window, shared_kv, lse_gradient)
    reasons = []
    for row in TABLE:
        if name not in ("auto", row.name):
            continue
        reason = row.refusal(case)
        if reason is None:
            return Kernel(row.name)
        reasons.append(f"{row.name} ({row.how}): {reason}")
    raise ValueError(f"kernel {name!r} cannot compute this case: " + "; ".join(reasons))


def kernels_here(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """The kernels for a device and dtype for which this machine has all that they need, best first."""
    return tuple(row.name for row in TABLE if (row.misfit(device.type, dtype) or row.missing(dtype)) is None)


def support_table(
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    qk_head_dim: int,
    v_head_dim: int,
    window: bool = False,
    shared_kv: bool = False,
    lse_gradient: bool = False,
) -> list[dict[str, str]]:
    """The table for one case, a dict of plain strings a row.

    Keys: kernel, how, devices, dtypes, head dims, window, shared key/value head, gradient of the LSE, usable. The
    last is "yes", "yes (auto)" for the row that ``select("auto", ...)`` takes, or the reason why not.
    """
    case = Case(torch.device(device).type, dtype, qk_head_dim, v_head_dim, window, shared_kv, lse_gradient)
    reasons = [row.refusal(case) for row in TABLE]
    chosen = reasons.index(None) if None in reasons else None
    return [
        {
            "kernel": row.name,
            "how": row.how,
            "devices": ", ".join(row.devices) or "any",
            "dtypes": ", ".join(str(d).removeprefix("torch.") for d in row.dtypes),
            "head dims": row.head_dims.words,
            "window": "yes" if row.window else "no",
            "shared key/value head": "yes" if row.shared_kv else "no",
            "gradient of the LSE": "yes" if row.lse_gradient else "no",
            "usable": ("yes (auto)" if i == chosen else "yes") if reason is None else reason,
        }
        for i, (row, reason) in enumerate(zip(TABLE, reasons, strict=True))
    ]
