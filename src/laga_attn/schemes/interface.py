"""What a scheme is to the autograd function that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from laga_attn.attention_plan import AttentionPlan
from laga_attn.grid import ContextParallel
from laga_attn.movement import Finish

__all__ = ["Backward", "Forward", "Grads", "Kept", "Latents", "Needs", "SchemeImpl"]

Kept = tuple[Any, ...]
"""Tensors (or None) kept for backward, in an order that is the scheme's own business."""


Latents = list[Finish]
"""Each key segment's latent, by a closure that waits for it."""


class Needs(NamedTuple):
    """Which gradients are wanted; `c_kv` and `k_rope` travel as one, so they are wanted together."""

    query: bool
    latent: bool
    weight: bool


class Grads(NamedTuple):
    """Gradients of `q`, `c_kv`, `k_rope` and `kv_b_weight`, in their shapes and dtypes."""

    query: Tensor | None
    c_kv: Tensor | None
    k_rope: Tensor | None
    weight: Tensor | None


class Forward(Protocol):
    def __call__(
        self,
        q: Tensor,
        c_kv: Tensor,
        k_rope: Tensor,
        weight: Tensor,
        plan: AttentionPlan,
        cp: ContextParallel,
        prefetched: Latents | None,
        /,
    ) -> tuple[Tensor, Tensor | None, Kept]: ...


class Backward(Protocol):
    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        kept: Kept,
        needs: Needs,
        plan: AttentionPlan,
        cp: ContextParallel,
        /,
    ) -> Grads: ...


@dataclass(frozen=True, slots=True)
class SchemeImpl:
    forward: Forward
    backward: Backward
