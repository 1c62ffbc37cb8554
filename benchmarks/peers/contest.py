"""One rank's work: try every peer on the inputs of the others, and race those that can compute MLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from benchmarks.peers import (
    torch_context_parallel,
    torch_sdpa,
    transformer_engine,
    transformers_attention,
    yunchang_ulysses,
)
from benchmarks.peers.ulysses import ulysses
from torch import Tensor

from laga_attn.attention import latent_attention
from laga_attn.bench.grid import Cell, Variant
from laga_attn.bench.measure import Attend, CellRun, Contestant, Inputs, measure, say
from laga_attn.bench.run import contestant, make_inputs
from laga_attn.grid import ContextParallel
from laga_attn.layout import SequenceLayout

__all__ = ["BASELINE", "PEERS", "Outcome", "contest", "own_variants", "try_peer"]

Build = Callable[[Cell, dist.ProcessGroup], Attend]

BASELINE: Final = "torch flash, V padded"
"""What a careful engineer writes today, and what all times are compared with."""

PEERS: Final[dict[str, Build]] = {
    BASELINE: lambda cell, group: ulysses(torch_sdpa.padded, cell.dims, group),
    "torch SDPA, V as it is": lambda cell, group: ulysses(torch_sdpa.plain, cell.dims, group),
    "Transformers eager": lambda cell, group: ulysses(transformers_attention.eager(cell), cell.dims, group),
    "Transformers sdpa": lambda cell, group: ulysses(transformers_attention.sdpa(cell), cell.dims, group),
    "yunchang + torch flash": yunchang_ulysses.with_torch_flash,
    "yunchang as it comes": yunchang_ulysses.stock,
    "torch context_parallel": torch_context_parallel.plain,
    "torch context_parallel, V padded": torch_context_parallel.padded,
    "Transformer Engine a2a": transformer_engine.ulysses,
}
_TOLERANCE: Final = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_SHOWN: Final = 300  # characters of an error


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank learnt.

    Attributes:
        difference: of each peer that computes MLA, the largest relative difference of output and input gradients from
            explicit Ulysses of this library.
        refused: of each other peer, its error.
    """

    run: CellRun
    difference: dict[str, float]
    refused: dict[str, str]


def own_variants(cell: Cell) -> list[Variant]:
    """Of this library: explicit Ulysses with the same kernel, LAGA with both ends of its `save`, and `"auto"`."""
    full = cell.ranks
    return [
        Variant("explicit", full, "kv"),
        Variant("laga", full, "latent"),
        Variant("laga", full, "kv"),
        Variant("auto", None, "auto"),
    ]


def contest(cell: Cell, rounds: int, peers: Sequence[str]) -> Outcome:
    """The baseline, the peers of these names and this library, on the default process group and one set of inputs."""
    group = dist.group.WORLD
    assert group is not None
    inputs = make_inputs(cell, dist.get_rank(), torch.device("cpu"))
    contestants: dict[str, Contestant] = {}
    difference, refused = {}, {}
    for name, build in PEERS.items():
        if name != BASELINE and name not in peers:
            continue
        say(f"trying {name}")
        attend, largest, problem = try_peer(build, cell, group, inputs)
        if problem is None and attend is not None:
            contestants[name], difference[name] = Contestant(attend), largest
        else:
            refused[name] = str(problem)
    contestants |= {variant.name_in(cell): contestant(variant, cell) for variant in own_variants(cell)}
    say(f"{cell}: {len(contestants)} contestants, {rounds} rounds")
    return Outcome(measure(contestants, inputs, rounds), difference, refused)


def try_peer(
    build: Build, cell: Cell, group: dist.ProcessGroup, inputs: Inputs
) -> tuple[Attend | None, float, str | None]:
    """The peer's attention, how far it is from ours on any rank, and why it is out of the race on any rank."""
    attend, largest, error = None, float("nan"), None
    try:
        attend = build(cell, group)
        pairs = zip(_results(attend, inputs), _results(_reference(cell, group), inputs), strict=True)
        largest = max(_difference(actual, expected) for actual, expected in pairs)
    except Exception as caught:  # whatever a peer does: its error is the result
        error = f"{type(caught).__name__}: {' '.join(str(caught).split())[:_SHOWN]}"
    everyone: list[tuple[float, str | None]] = [(largest, error)] * cell.ranks
    dist.all_gather_object(everyone, (largest, error), group=group)
    largest = max(difference for difference, _ in everyone)
    error = next((e for _, e in everyone if e is not None), None)
    if error is None and not largest <= _TOLERANCE[inputs.q.dtype]:
        error = f"wrong results: relative difference {largest:.2g} from explicit Ulysses"
    return attend, largest, error


def _reference(cell: Cell, group: dist.ProcessGroup) -> Attend:
    """Explicit Ulysses over the sequence as the peers split it: contiguously."""
    return partial(
        latent_attention,
        layout=SequenceLayout.contiguous(cell.seq_len, cell.ranks),
        cp=ContextParallel(group, cell.ranks),
        scheme="explicit",
        qk_nope_head_dim=cell.dims.qk_nope_head_dim,
        v_head_dim=cell.dims.v_head_dim,
    )


def _results(attend: Attend, inputs: Inputs) -> list[Tensor]:
    """Output and gradients of q and the latents."""
    *tensors, dout = inputs
    out = attend(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors[:3], dout)]


def _difference(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).abs().max() / expected.abs().max())
