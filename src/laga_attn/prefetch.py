"""Start the latent gather early, before the queries exist, and hand it to `latent_attention` later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from laga_attn.agreement import agree
from laga_attn.attention_plan import SCHEMES, Scheme, routing_of
from laga_attn.grid import ContextParallel
from laga_attn.layout import SequenceLayout
from laga_attn.movement import Finish
from laga_attn.schemes.latent import start_latents

__all__ = ["LatentGather", "prefetch_latent"]


Options = tuple[SequenceLayout, Scheme, int, bool, bool, int | None]


@dataclass(frozen=True, slots=True, eq=False)
class LatentGather:
    """A latent gather under way. Use it in one `latent_attention` call, with the very tensors that it was made of."""

    c_kv: Tensor
    k_rope: Tensor
    options: Options  # layout, scheme, ulysses_degree, two_level, causal, window
    segments: list[Finish]

    def is_of(self, c_kv: Tensor, k_rope: Tensor) -> bool:
        """Whether these latents, and not others of the same shape, are on their way."""
        return c_kv is self.c_kv and k_rope is self.k_rope


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast where it is on; like torch's own, it leaves fp64 alone."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def prefetch_latent(
    c_kv: Tensor,
    k_rope: Tensor,
    *,
    layout: SequenceLayout,
    cp: ContextParallel,
    scheme: str = "laga",
    causal: bool = True,
    window: int | None = None,
) -> LatentGather:
    """Start gathering latents; pass the result as `latent_attention(..., prefetched=)`.

    The gather then runs while the queries are projected. Numbers and bytes are those of a call without it.

    Args:
        c_kv: `[B, s, kv_lora_rank]`, as for `latent_attention`; so are `k_rope` and the options.
        k_rope: `[B, s, rope]`.
        layout: who holds which token.
        cp: the ranks. A `ulysses_degree` left open means 1.
        scheme: `"laga"` or `"absorbed"`; explicit gathers no latent and `"auto"` needs the queries to choose.
        causal: as in the call to come.
        window: as in the call to come.

    Raises:
        ValueError: arguments that do not fit or differ between ranks, on every rank, before data moves.
    """
    problem = None
    if scheme not in ("laga", "absorbed"):
        others = [name for name in (*SCHEMES, "auto") if name not in ("laga", "absorbed")]
        problem = f"scheme {scheme!r} has no latent to gather ahead; use 'laga' or 'absorbed', not {', '.join(others)}"
    elif layout.cp_size != cp.size:
        problem = f"the layout is for {layout.cp_size} ranks, but the context-parallel group has {cp.size}"
    elif c_kv.ndim != 3 or k_rope.ndim != 3 or c_kv.shape[:2] != k_rope.shape[:2] or c_kv.shape[1] != layout.local_len:
        problem = (
            f"c_kv and k_rope must be [B, {layout.local_len}, ...] in this layout, "
            f"got {list(c_kv.shape)} and {list(k_rope.shape)}"
        )
    elif c_kv.dtype != k_rope.dtype or c_kv.device != k_rope.device:
        problem = (
            "c_kv and k_rope need one dtype and device, "
            f"got {c_kv.dtype} on {c_kv.device} and {k_rope.dtype} on {k_rope.device}"
        )
    window = None if window is not None and window >= max(layout.lengths) else window
    degree = cp.ulysses_degree or 1
    signature = {
        "shape of c_kv": tuple(c_kv.shape), "shape of k_rope": tuple(k_rope.shape),
        "dtypes": (str(c_kv.dtype), str(k_rope.dtype)), "layout": layout, "scheme": scheme,
        "ulysses_degree": cp.ulysses_degree, "two_level": cp.two_level, "causal": causal, "window": window,
    }  # fmt: skip
    agree(cp, signature, problem)
    named = cast(Scheme, scheme)
    routing = routing_of(named, degree, layout, cp, causal, window)
    wire_c_kv, wire_k_rope = autocast(c_kv.detach(), k_rope.detach())
    latents = start_latents(wire_c_kv, wire_k_rope, routing, cp, "forward")
    return LatentGather(c_kv, k_rope, (layout, named, degree, cp.two_level, causal, window), latents)
