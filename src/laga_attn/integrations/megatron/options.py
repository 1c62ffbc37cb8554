"""How a layer splits its work over the context-parallel ranks: scheme, Ulysses degree, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, cast

from laga_attn.attention_plan import SAVE_POLICIES, SCHEMES, LatentDims, Scheme
from laga_attn.auto import estimate, legal_degrees
from laga_attn.grid import ContextParallel
from laga_attn.layout import SequenceLayout

__all__ = ["LatentOptions", "UlyssesDegree", "cheapest_degree", "context_parallel"]

UlyssesDegree: TypeAlias = int | Literal["auto"]

_CACHED: Final = 256


@dataclass(frozen=True, slots=True)
class LatentOptions:
    """The arguments of `with_laga`.

    Raises:
        ValueError: a scheme, degree or `save` policy that does not exist.
    """

    scheme: str = "laga"
    ulysses_degree: UlyssesDegree = "auto"
    save: str = "auto"

    def __post_init__(self) -> None:
        schemes = (*SCHEMES, "auto")
        if self.scheme not in schemes:
            raise ValueError(f"unknown scheme {self.scheme!r}; choose one of {', '.join(schemes)}")
        policies = ("auto", *SAVE_POLICIES.get(self.scheme, ("latent",)))
        if self.save not in policies:
            raise ValueError(
                f"save={self.save!r} is not possible with scheme {self.scheme!r}; choose one of {', '.join(policies)}"
            )
        degree = self.ulysses_degree
        if degree != "auto" and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 1):
            raise ValueError(f"ulysses_degree={degree!r} must be 'auto' or a divisor of the context-parallel ranks")


def context_parallel(group: Any, ulysses_degree: UlyssesDegree, cp_comm_type: str | None) -> ContextParallel:
    """The ranks of a layer; the degree stays open where neither argument names one.

    Args:
        group: Megatron's context-parallel group.
        cp_comm_type: Megatron's way to say how attention communicates. `"p2p"`, the default of its command line,
            says nothing; `"all_gather"` is a degree of 1 and `"a2a"` one of all ranks.

    Raises:
        ValueError: the two contradict each other, a degree that does not divide the ranks, or `"a2a+p2p"`.
    """
    size = group.size()
    cp = ContextParallel.none() if size == 1 else ContextParallel(group)
    degree = None if ulysses_degree == "auto" else ulysses_degree
    if size > 1 and cp_comm_type not in (None, "p2p"):
        degrees = {"all_gather": 1, "a2a": size}
        if cp_comm_type not in degrees:
            raise ValueError(
                f"cp_comm_type={cp_comm_type!r} has no counterpart in latent attention; leave it at None or 'p2p' and "
                "choose ulysses_degree in with_laga, or use 'all_gather' or 'a2a'"
            )
        named = degrees[cp_comm_type]
        if degree not in (None, named):
            raise ValueError(
                f"cp_comm_type={cp_comm_type!r} means ulysses_degree={named} on {size} ranks, but with_laga was given "
                f"ulysses_degree={degree}; drop one of the two"
            )
        degree = named
    return cp.with_ulysses(degree)


@lru_cache(maxsize=_CACHED)
def cheapest_degree(
    options: LatentOptions,
    dims: LatentDims,
    layout: SequenceLayout,
    *,
    causal: bool,
    window: int | None,
    batch: int,
    itemsize: int,
    flops_per_port_byte: float,
) -> int:
    """The Ulysses degree of least cost for the scheme of `options`, by the rule of `laga_attn.auto`."""
    costs = [
        estimate(
            cast(Scheme, options.scheme), dims, layout, degree, causal=causal, window=window, batch=batch,
            itemsize=itemsize, save=options.save,
        )
        for degree in legal_degrees(layout.cp_size, dims.num_heads)
    ]  # fmt: skip
    return min(costs, key=lambda cost: cost.total(flops_per_port_byte)).ulysses_degree
