"""`scheme="auto"`: the scheme and the Ulysses degree with the least bytes-and-FLOPs cost.

The rule: cost = port bytes + FLOPs / F, of the busiest rank, forward plus backward, with F the FLOPs that a device does
while one byte goes through its port; of bytes sent and received the larger count. Both come from the closed forms of
the planner (`laga_attn.plan.formulas`), which count what the code does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, cast

from laga_attn.attention_plan import SAVE_POLICIES, LatentDims, Save, Scheme
from laga_attn.layout import SequenceLayout
from laga_attn.plan.formulas import busier_way, busy_ranks, flop_count, port_elements

__all__ = [
    "CPU_FLOPS_PER_PORT_BYTE",
    "FLOPS_PER_PORT_BYTE",
    "Cost",
    "choose",
    "estimate",
    "flops_per_port_byte",
    "legal_degrees",
    "port_elements",
]

FLOPS_PER_PORT_BYTE: Final = 2000.0
"""F in 16-bit floats: about 400 TFLOP/s of attention over 200 GB/s of port, an H100-class GPU inside its node.

Slower links raise it, which favours the latent on the wire.
"""

CPU_FLOPS_PER_PORT_BYTE: Final = 800.0
"""F in bf16 for ranks of one CPU machine: some 190 GFLOP/s of a rank's attention on Zen 4 over 240 MB/s, at which
gloo's copies, made by the cores that compute, make it right there about what is faster: 650 to 1600 would."""

_ITEMSIZE: Final = 2  # of the elements for which the two are
_CACHED: Final = 256
_SCHEMES: Final[tuple[Scheme, ...]] = ("laga", "explicit", "absorbed")  # of equals the first is taken


@dataclass(frozen=True, slots=True)
class Cost:
    """One candidate: bytes through the port and FLOPs, forward plus backward, of each rank that may be the busiest."""

    scheme: Scheme
    ulysses_degree: int
    ranks: tuple[tuple[int, int], ...]

    @property
    def port_bytes(self) -> int:
        """Of the rank that moves most."""
        return max(moved for moved, _ in self.ranks)

    def total(self, flops_per_port_byte: float) -> float:
        """Of the slowest rank, which the others wait for; in bytes."""
        return max(moved + flops / flops_per_port_byte for moved, flops in self.ranks)


def flops_per_port_byte(given: float | None, device: str, itemsize: int) -> float:
    """F as given, else the default for a device type and elements of `itemsize` bytes.

    Elements twice as wide are computed with at half the speed or less, while a byte stays a byte.
    """
    if given is not None:
        return given
    return (CPU_FLOPS_PER_PORT_BYTE if device == "cpu" else FLOPS_PER_PORT_BYTE) * _ITEMSIZE / itemsize


def legal_degrees(cp_size: int, num_heads: int) -> list[int]:
    """Every U that divides the ranks and the heads."""
    return [u for u in range(1, cp_size + 1) if cp_size % u == 0 and num_heads % u == 0]


def estimate(
    scheme: Scheme,
    dims: LatentDims,
    layout: SequenceLayout,
    ulysses_degree: int,
    *,
    causal: bool,
    itemsize: int,
    batch: int = 1,
    window: int | None = None,
    save: str = "auto",
) -> Cost:
    """Cost of one candidate.

    Args:
        scheme: what to run, at `ulysses_degree`.
        dims: sizes of the layer.
        layout: who holds which token.
        causal: as for `latent_attention`, like `window`.
        itemsize: bytes of an element.
        batch: sequences in a batch.
        window: see `causal`.
        save: a policy that the scheme has, or `"auto"` for its default.
    """
    policy = SAVE_POLICIES[scheme][0] if save == "auto" else cast(Save, save)
    ranks = tuple(
        (
            busier_way(scheme, policy, dims, view, sent, ulysses_degree, batch=batch, itemsize=itemsize),
            flop_count(scheme, policy, dims, view, ulysses_degree, batch=batch).total,
        )
        for view, sent in busy_ranks(layout, ulysses_degree, causal, window)
    )
    return Cost(scheme, ulysses_degree, ranks)


@lru_cache(maxsize=_CACHED)
def choose(
    dims: LatentDims,
    layout: SequenceLayout,
    *,
    causal: bool,
    itemsize: int,
    batch: int = 1,
    window: int | None = None,
    save: str = "auto",
    ulysses_degree: int | None = None,
    flops_per_port_byte: float = FLOPS_PER_PORT_BYTE,
) -> tuple[Scheme, int]:
    """The cheapest `(scheme, ulysses_degree)`; a given degree is kept.

    One rank moves nothing, so there `laga` wins by what it saves in memory.
    """
    if layout.cp_size == 1:
        return "laga", 1
    degrees = legal_degrees(layout.cp_size, dims.num_heads) if ulysses_degree is None else [ulysses_degree]
    candidates = [
        estimate(scheme, dims, layout, degree, batch=batch, causal=causal, window=window, itemsize=itemsize, save=save)
        for scheme in _SCHEMES
        for degree in degrees
    ]
    best = min(candidates, key=lambda cost: cost.total(flops_per_port_byte))
    return best.scheme, best.ulysses_degree
