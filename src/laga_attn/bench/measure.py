"""One rank's measurements: what a step of each contestant takes, and how long, all contestants taking turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from laga_attn.bench.exchanges import Exchanges
from laga_attn.bench.gemm import fastest_gemm
from laga_attn.bench.link import Link, received_rate, set_link
from laga_attn.bench.malloc import keep_freed_memory
from laga_attn.bench.memory import TensorMemory, saved_tensors
from laga_attn.bench.race import race
from laga_attn.grid import ContextParallel
from laga_attn.traffic import Traffic, traffic

__all__ = [
    "GEMM",
    "Attend",
    "CellRun",
    "Contestant",
    "Inputs",
    "Key",
    "Mode",
    "RaceRun",
    "Usage",
    "layer_step",
    "measure",
    "say",
]

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`q, c_kv, k_rope, kv_b_weight` to the output, all of this rank, shapes as in `latent_attention`."""

Mode = Literal["run", "no overlap", "exchanges"]
"""A contestant as it is; with every collective finished where it starts; its exchanges alone."""

Key: TypeAlias = tuple[str, Mode]
"""A contestant's name and the mode that was timed."""

GEMM: Final[Key] = ("GEMM", "run")


class Inputs(NamedTuple):
    """A rank's arguments of one attention call, and the gradient of its output."""

    q: Tensor
    c_kv: Tensor
    k_rope: Tensor
    weight: Tensor
    dout: Tensor


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to compute attention.

    Attributes:
        attend: as it is used.
        without_overlap: the same with every collective finished where it starts; None: not timed.
        exchanges: whether its collectives are also timed alone; they must be those of `laga_attn.collectives`.
    """

    attend: Attend
    without_overlap: Attend | None = None
    exchanges: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """What one forward and backward takes on this rank besides time, in bytes.

    Attributes:
        sent_forward: through this rank's port, by the ledger; 0 for contestants that do not write into it.
        sent_backward: the same in backward.
        sent_to: of both, by peer.
        saved: what autograd keeps for backward, weights excluded.
        peak: the most that tensors made during the step took at once, q and latents included as long as they are kept.
        resident: by which a process of its own grew at most; None where that was not asked or the kernel cannot tell.
    """

    sent_forward: int
    sent_backward: int
    sent_to: tuple[int, ...]
    saved: int
    peak: int
    resident: int | None = None


@dataclass(frozen=True, slots=True)
class RaceRun:
    """Seconds on this rank by round, and the bits per second that arrived when the link was tried."""

    seconds: dict[Key, list[float]]
    received_rate: float | None


@dataclass(frozen=True, slots=True)
class CellRun:
    """What one rank learnt; one race per link, or one where there is no link."""

    usage: dict[str, Usage]
    gemm_how: str
    gemm_flops: int
    races: list[RaceRun]


def measure(
    contestants: Mapping[str, Contestant],
    inputs: Inputs,
    rounds: int,
    *,
    links: Sequence[Link] = (),
) -> CellRun:
    """Measure the contestants on the ranks of the default process group, all of them together.

    From then on the process keeps the memory that it frees (`laga_attn.bench.malloc`), as with a GPU's cache.

    Args:
        contestants: by name; the same, in the same order, on all ranks.
        inputs: of this rank.
        rounds: how often each contestant is timed.
        links: what the cable between two nodes is to do, one after the other; only for ranks in `two_nodes`.
    """
    keep_freed_memory()
    if links:
        set_link(None)  # only the races need it slow
    group = dist.group.WORLD
    assert group is not None
    cp = ContextParallel(group)
    usage: dict[str, Usage] = {}
    steps: dict[Key, Callable[[], object]] = {}
    for name, contestant in contestants.items():
        ledger, usage[name] = _take_stock(contestant.attend, inputs)
        steps[name, "run"] = _step(contestant.attend, inputs)
        if contestant.without_overlap is not None:
            steps[name, "no overlap"] = _step(contestant.without_overlap, inputs)
        if contestant.exchanges:
            steps[name, "exchanges"] = Exchanges(ledger.select(), cp, inputs.q.device)
    finish = torch.cuda.synchronize if inputs.q.is_cuda else _nothing
    gemm = fastest_gemm(inputs.q.dtype, inputs.q.device, finish)
    steps[GEMM] = gemm.step

    races = []
    for link in links or (None,):
        rate = None
        if link is not None:
            say(f"  link {link}")
            set_link(link)
            rate = received_rate(link)
        races.append(RaceRun(race(steps, rounds, dist.barrier, finish), rate))
    return CellRun(usage, gemm.how, gemm.flops, races)


def say(line: str) -> None:
    """Progress, once and not among the results."""
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def _step(attend: Attend, inputs: Inputs) -> Callable[[], None]:
    *tensors, dout = inputs

    def step() -> None:
        torch.autograd.grad(attend(*tensors), tensors, dout)

    return step


def layer_step(attend: Attend, inputs: Inputs) -> Callable[[], None]:
    """Forward and backward as in a layer, with all the memory that they take."""

    def step() -> None:
        torch.autograd.grad(_forward(attend, inputs), inputs[:4], inputs.dout)

    return step


def _forward(attend: Attend, inputs: Inputs) -> Tensor:
    # As in a layer, q and the latents are made just before and belong to whoever keeps them.
    q, c_kv, k_rope = (tensor.clone() for tensor in inputs[:3])
    return attend(q, c_kv, k_rope, inputs.weight)


def _take_stock(attend: Attend, inputs: Inputs) -> tuple[Traffic, Usage]:
    """Two steps that are not timed: they warm up, too."""

    with traffic() as ledger:
        with saved_tensors(excluded=[inputs.weight]) as saved:
            out = _forward(attend, inputs)
        torch.autograd.grad(out, inputs[:4], inputs.dout)
    step = layer_step(attend, inputs)
    peak = _peak_on_gpu(step) if inputs.q.is_cuda else _peak_on_cpu(step)
    return ledger, Usage(
        sent_forward=ledger.sent(phase="forward"),
        sent_backward=ledger.sent(phase="backward"),
        sent_to=tuple(map(sum, zip(*(record.sent_to for record in ledger.select()), strict=True))),
        saved=saved.nbytes,
        peak=peak,
    )


def _peak_on_cpu(step: Callable[[], object]) -> int:
    memory = TensorMemory()
    with memory:
        step()
    return memory.peak


def _peak_on_gpu(step: Callable[[], object]) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return int(torch.cuda.max_memory_allocated() - before)


def _nothing() -> None:
    """On a CPU every step is finished when it returns."""
