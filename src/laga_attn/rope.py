"""Rotary position embedding for the shared key part of MLA and its queries: frequencies, angles, rotation.

Angles are computed from the positions of the rows at hand. No table is kept: a table has a length, and under
context parallelism a rank holds late positions however few rows it has.
"""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from laga_attn.config import MLAConfig, RopeScaling

__all__ = ["Pairing", "apply_rope", "inverse_frequencies", "rope_cos_sin"]

Pairing: TypeAlias = Literal["half", "interleave", "complex"]
"""Which elements form a rotated pair, and where the result goes, for a rotated width d:

* ``"half"``: elements i and i + d/2, in place (GPT-NeoX; ``rope_interleave=False``);
* ``"interleave"``: elements 2i and 2i + 1, moved to i and i + d/2 (``rope_interleave=True``);
* ``"complex"``: elements 2i and 2i + 1, in place (DeepSeek's complex product).

The last two differ by a permutation that queries and keys share, so their scores are the same.
"""

_COMPUTED: Final = ("default", "yarn")


def inverse_frequencies(
    cfg: MLAConfig, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Radians per position of each rotary pair, slowed down by YaRN where the config has it.

    Pair i turns by ``rope_theta ** (-2i / qk_rope_head_dim)`` per position. YaRN ("NTK-by-parts", arXiv
    2309.00071, section 3.2) divides the slow ones by ``factor`` and blends towards the fast ones.

    Args:
        cfg: the layer.
        device: where to compute.
        dtype: ``torch.float32``, or ``torch.float64`` for reference computations.

    Returns:
        ``[qk_rope_head_dim / 2]`` of ``dtype``.

    Raises:
        ValueError: a ``rope_type`` that is neither ``"default"`` nor ``"yarn"``.
    """
    scaling = cfg.rope_scaling
    if scaling.rope_type not in _COMPUTED:
        raise ValueError(
            f"rope_type {scaling.rope_type!r} is not computed here, only {' and '.join(_COMPUTED)}: rotate "
            "queries and keys with the model's own RoPE and pass them to latent_attention"
        )
    dim = cfg.qk_rope_head_dim
    # The order of operations is that of Transformers, to get its bits in fp32.
    powers = cfg.rope_theta ** (torch.arange(0, dim, 2, device=device).to(dtype) / dim)  # [dim / 2]
    fast = 1.0 / powers
    if scaling.rope_type == "default":
        return fast
    slow = 1.0 / (scaling.factor * powers)
    keep = 1 - _blend(scaling, cfg.rope_theta, dim, powers)
    return slow * (1 - keep) + fast * keep


def _blend(scaling: RopeScaling, theta: float, dim: int, like: Tensor) -> Tensor:
    """How far each pair is slowed down: 0 up to the fast ``first``, 1 from ``last`` on, linear between."""
    first = _pair_with_turns(scaling.beta_fast, scaling, theta, dim)
    last = _pair_with_turns(scaling.beta_slow, scaling, theta, dim)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step instead of a division by 0
    pairs = torch.arange(dim // 2, device=like.device).to(like.dtype)
    return ((pairs - first) / (last - first)).clamp(0, 1)


def _pair_with_turns(turns: float, scaling: RopeScaling, theta: float, dim: int) -> float:
    """The (fractional) pair that turns so many times over the original length."""
    original = scaling.original_max_position_embeddings
    assert original is not None  # RopeScaling checks it
    return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rope_cos_sin(cfg: MLAConfig, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin of every rotary angle, times :attr:`RopeScaling.cos_sin_factor`.

    Args:
        cfg: the layer.
        positions: integer positions of any shape, on the device to compute on.
        dtype: of computation and result; ``torch.float64`` for fp64 models.

    Returns:
        Two tensors ``[*positions.shape, qk_rope_head_dim / 2]`` of ``dtype``.

    Raises:
        ValueError: see :func:`inverse_frequencies`.
    """
    frequencies = inverse_frequencies(cfg, device=positions.device, dtype=dtype)
    angles = positions.unsqueeze(-1).to(dtype) * frequencies  # [..., rope / 2]
    factor = cfg.rope_scaling.cos_sin_factor
    return angles.cos() * factor, angles.sin() * factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """Rotate the pairs of the last dimension; ``x`` is left as it is.

    The rotation is computed in the wider dtype of ``x`` and ``cos`` and rounded once.

    Args:
        x: ``[..., d]``, d even.
        cos: broadcastable to ``[..., d / 2]``, from :func:`rope_cos_sin`.
        sin: like ``cos``.
        pairing: which elements form a pair, see :data:`Pairing`.

    Returns:
        A new tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: unknown pairing, or sizes that do not fit.
    """
    if pairing not in get_args(Pairing):
        raise ValueError(f"unknown pairing {pairing!r}; choose one of {', '.join(get_args(Pairing))}")
    width = x.shape[-1]
    if width != 2 * cos.shape[-1]:
        raise ValueError(f"x has width {width}, which is not twice the {cos.shape[-1]} pairs of cos and sin")
    if pairing == "half":
        a, b = x[..., : width // 2], x[..., width // 2 :]
    else:
        a, b = x[..., 0::2], x[..., 1::2]
    real = (a * cos - b * sin).to(x.dtype)  # [..., d / 2]
    imaginary = (b * cos + a * sin).to(x.dtype)
    if pairing == "complex":
        return torch.stack((real, imaginary), dim=-1).flatten(-2)
    return torch.cat((real, imaginary), dim=-1)
