"""Start the latent gather early, before the queries exist, and hand it to `latent_attention` later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from laga_attn.agreement import agree
from laga_attn.attention_plan import SCHEMES, Scheme, routing_of
from laga_attn.grid import ContextParallel
from laga_attn.layout import SequenceLayout
from laga_attn.movement import Finish
from laga_attn.routing import Routing
from laga_attn.schemes.latent import start_latents

__all__ = ["LatentGather", "prefetch_latent"]


@dataclass(frozen=True, slots=True, eq=False)
class LatentGather:
    """A latent gather under way. Use it in one `latent_attention` call, with the very tensors that it was made of."""

    c_kv: Tensor
    k_rope: Tensor
    routing: Routing
    segments: list[Finish]

    def misuse(self, c_kv: Tensor, k_rope: Tensor, routing: Routing) -> str | None:
        """Why this gather does not belong to a call with these latents and this plan, or None."""
        if c_kv is not self.c_kv or k_rope is not self.k_rope:
            return "prefetched was started with other tensors; pass the c_kv and k_rope that went into prefetch_latent"
        if routing is not self.routing:
            return (
                "prefetched was started for another layout, scheme, ulysses_degree, causal or window; "
                "pass the same to prefetch_latent and latent_attention"
            )
        return None


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
    elif c_kv.ndim != 3 or k_rope.ndim != 3 or {c_kv.shape[1], k_rope.shape[1]} != {layout.local_len}:
        problem = (
            f"c_kv and k_rope must be [B, {layout.local_len}, ...] in this layout, "
            f"got {list(c_kv.shape)} and {list(k_rope.shape)}"
        )
    signature = {
        "shape of c_kv": tuple(c_kv.shape), "shape of k_rope": tuple(k_rope.shape), "dtype": str(c_kv.dtype),
        "layout": layout, "scheme": scheme, "ulysses_degree": cp.ulysses_degree, "two_level": cp.two_level,
        "causal": causal, "window": window,
    }  # fmt: skip
    agree(cp, signature, problem)
    routing = routing_of(cast(Scheme, scheme), cp.ulysses_degree or 1, layout, cp, causal, window)
    latents = start_latents(c_kv.detach(), k_rope.detach(), routing, cp, "forward")
    return LatentGather(c_kv, k_rope, routing, latents)
