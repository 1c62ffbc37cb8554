"""`scheme="auto"`: the scheme and the Ulysses degree with the least bytes-and-FLOPs cost.

The rule, per rank and for forward plus backward: cost = port bytes + FLOPs beyond the cheapest form / F, with F the
FLOPs that the device does while one byte goes through its port. The byte counts are the closed forms of
`docs/design.md`; they take every key as visible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from laga_attn.attention_plan import LatentDims, Scheme

__all__ = ["FLOPS_PER_PORT_BYTE", "Cost", "choose", "estimate", "legal_degrees", "port_elements"]

FLOPS_PER_PORT_BYTE: Final = 2000.0
"""F: about 400 TFLOP/s of attention over 200 GB/s of port, an H100-class GPU inside its node.

Slower links raise it, which favours the latent on the wire; ranks of one CPU machine are nearer 300.
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """One candidate: port bytes and extra FLOPs of one rank, forward plus backward."""

    scheme: Scheme
    ulysses_degree: int
    port_bytes: float
    extra_flops: float

    def total(self, flops_per_port_byte: float) -> float:
        return self.port_bytes + self.extra_flops / flops_per_port_byte


def legal_degrees(cp_size: int, num_heads: int) -> list[int]:
    """Every U that divides the ranks and the heads."""
    return [u for u in range(1, cp_size + 1) if cp_size % u == 0 and num_heads % u == 0]


def port_elements(scheme: Scheme, dims: LatentDims, tokens: int, cp_size: int, ulysses_degree: int) -> float:
    """Elements that one rank sends (and receives) in a forward pass when every key is visible to every rank.

    Args:
        tokens: real tokens that the rank holds, times the batch size.
    """
    members, groups = ulysses_degree, cp_size // ulysses_degree
    head_dims = dims.qk_head_dim + dims.v_head_dim
    exchanged = tokens * dims.num_heads * head_dims * (members - 1) / members
    if scheme == "explicit":
        return exchanged + tokens * dims.num_heads * head_dims * ((members - 1) / members + groups - 1)
    return exchanged + tokens * dims.latent_dim * (cp_size - 1)


def estimate(
    scheme: Scheme, dims: LatentDims, tokens: int, cp_size: int, ulysses_degree: int, *, causal: bool, itemsize: int
) -> Cost:
    """Cost of one candidate with its default `save` policy.

    Extra FLOPs are those beyond explicit attention with kept K and V: what `laga` rebuilds beyond the one
    expansion of its own tokens in forward and backward, and what `absorbed` does in wider heads.
    """
    heads = dims.num_heads // ulysses_degree
    keys = tokens * cp_size
    group_queries = tokens * ulysses_degree
    expansion = 2.0 * dims.kv_lora_rank * dims.up_head_dim  # FLOPs per token and head
    at_home = expansion * tokens * dims.num_heads  # explicit expands once, and folds gradients with twice that
    forward = port_elements(scheme, dims, tokens, cp_size, ulysses_degree)
    if scheme == "explicit":
        return Cost(scheme, ulysses_degree, 2 * forward * itemsize, 0.0)
    regather = tokens * dims.latent_dim * (cp_size - 1)
    port_bytes = (2 * forward + regather) * itemsize
    if scheme == "laga":
        rebuilt = expansion * keys * heads
        return Cost(scheme, ulysses_degree, port_bytes, 4 * rebuilt - 3 * at_home)
    pairs = group_queries * keys / (2 if causal else 1)
    # Forward does QK and PV (2 GEMMs), backward QK, dP, dV, dQ and dK: 4 in q's width and 3 in v's in all.
    wider = 2.0 * pairs * heads * (4 * (dims.latent_dim - dims.qk_head_dim) + 3 * (dims.kv_lora_rank - dims.v_head_dim))
    return Cost(scheme, ulysses_degree, port_bytes, wider)


def choose(
    dims: LatentDims,
    tokens: int,
    cp_size: int,
    *,
    causal: bool,
    itemsize: int,
    ulysses_degree: int | None = None,
    flops_per_port_byte: float = FLOPS_PER_PORT_BYTE,
) -> tuple[Scheme, int]:
    """The cheapest `(scheme, ulysses_degree)`; a given degree is kept.

    One rank moves nothing, so there `laga` wins by what it saves in memory.
    """
    if cp_size == 1:
        return "laga", 1
    degrees = legal_degrees(cp_size, dims.num_heads) if ulysses_degree is None else [ulysses_degree]
    schemes: tuple[Scheme, ...] = ("laga", "explicit", "absorbed")
    candidates = [
        estimate(scheme, dims, tokens, cp_size, degree, causal=causal, itemsize=itemsize)
        for scheme in schemes
        for degree in degrees
    ]
    best = min(candidates, key=lambda cost: cost.total(flops_per_port_byte))
    return best.scheme, best.ulysses_degree
