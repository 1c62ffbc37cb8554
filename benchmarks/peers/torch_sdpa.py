"""`torch.nn.functional.scaled_dot_product_attention`: with V padded to the width of K, and as it is.

On the CPU torch's flash kernel wants equal widths; with V as narrow as it is, torch takes its plain formulas, which
hold whole score matrices. So a careful engineer pads V and cuts the output.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional  # as a module: context_parallel replaces the function in it

__all__ = ["padded", "plain"]


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The flash kernel on `[1, S, h, D]`."""
    return plain(q, k, functional.pad(v, (0, k.shape[-1] - v.shape[-1])))[..., : v.shape[-1]]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Whatever torch chooses for unequal widths."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # heads first
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
