"""One rank's work in `laga-attn bench`: the inputs and contestants of each cell, measured together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from laga_attn.attention import latent_attention
from laga_attn.bench.grid import DTYPES, Cell, Grid, Variant
from laga_attn.bench.link import Link
from laga_attn.bench.malloc import return_freed_memory
from laga_attn.bench.measure import Attend, CellRun, Contestant, Inputs, layer_step, measure, say
from laga_attn.bench.ranks import Device
from laga_attn.bench.resident import resident_growth
from laga_attn.grid import ContextParallel
from laga_attn.kernels import KernelName, select
from laga_attn.train.errors import UsageError

__all__ = ["Task", "check_kernel", "contestant", "make_inputs", "resident_on_rank", "run_rank", "with_resident"]


@dataclass(frozen=True, slots=True)
class Task:
    """What all ranks of one process group measure.

    Attributes:
        cells: with the variants of each, the baseline first.
        links: bandwidths to set one after the other; empty where ranks share a machine's loopback.
        overlap: also time every variant without overlap, and its exchanges alone.
    """

    cells: tuple[tuple[Cell, tuple[Variant, ...]], ...]
    rounds: int
    device: Device
    kernel: KernelName
    links: tuple[Link, ...]
    overlap: bool


def run_rank(task: Task) -> list[CellRun]:
    """Every cell of the task, on one rank of the default process group."""
    runs = []
    for cell, variants in task.cells:
        say(f"{cell}: {len(variants)} variants, {task.rounds} rounds")
        contestants = {
            variant.name_in(cell, task.device): contestant(
                variant, cell, task.kernel, overlap=task.overlap, exchanges=bool(task.links) and number == 0
            )
            for number, variant in enumerate(variants)
        }
        inputs = make_inputs(cell, dist.get_rank(), torch.device(task.device))
        runs.append(measure(contestants, inputs, task.rounds, links=task.links))
    return runs


def resident_on_rank(task: Task) -> list[dict[str, int | None]]:
    """By cell and name, the bytes by which a process that does nothing else grows: no place to measure time."""
    return_freed_memory()
    grown: list[dict[str, int | None]] = []
    for cell, variants in task.cells:
        say(f"{cell}: resident memory")
        inputs = make_inputs(cell, dist.get_rank(), torch.device(task.device))
        grown.append({})
        for variant in variants:
            step = layer_step(contestant(variant, cell, task.kernel).attend, inputs)
            step()
            grown[-1][variant.name_in(cell, task.device)] = resident_growth(step)
    return grown


def with_resident(runs: Sequence[CellRun], grown: Sequence[dict[str, int | None]]) -> list[CellRun]:
    """What one rank learnt in both."""
    return [
        replace(run, usage={name: replace(usage, resident=of[name]) for name, usage in run.usage.items()})
        for run, of in zip(runs, grown, strict=True)
    ]


def contestant(
    variant: Variant, cell: Cell, kernel: KernelName = "auto", *, overlap: bool = False, exchanges: bool = False
) -> Contestant:
    """`latent_attention` as the variant says, over the default process group.

    Args:
        overlap: also time it without overlap, and its exchanges alone.
        exchanges: time its exchanges alone.
    """
    group = dist.group.WORLD
    assert group is not None

    def attend(overlapping: bool) -> Attend:
        cp = ContextParallel(
            group, variant.ulysses_degree, overlap=overlapping, flops_per_port_byte=variant.flops_per_port_byte
        )
        return partial(
            latent_attention,
            layout=cell.layout,
            cp=cp,
            scheme=variant.scheme,
            qk_nope_head_dim=cell.dims.qk_nope_head_dim,
            v_head_dim=cell.dims.v_head_dim,
            save=variant.save,
            kernel=kernel,
        )

    return Contestant(attend(True), attend(False) if overlap else None, overlap or exchanges)


def make_inputs(cell: Cell, rank: int, device: torch.device) -> Inputs:
    """Random inputs of a rank: the same for every contestant, the weight the same on all ranks."""
    dims, dtype, tokens = cell.dims, DTYPES[cell.dtype], cell.layout.local_len

    def random(number: int, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(number)).to(device, dtype)

    first = 4 * rank
    up = random(0, dims.num_heads * dims.up_head_dim, dims.kv_lora_rank)
    return Inputs(
        q=random(first + 1, 1, tokens, dims.num_heads, dims.qk_head_dim).requires_grad_(),
        c_kv=random(first + 2, 1, tokens, dims.kv_lora_rank).requires_grad_(),
        k_rope=random(first + 3, 1, tokens, dims.qk_rope_head_dim).requires_grad_(),
        weight=(up * dims.kv_lora_rank**-0.5).requires_grad_(),  # keys and values of the size of queries
        dout=random(first + 4, 1, tokens, dims.num_heads, dims.v_head_dim),
    )


def check_kernel(name: str, grid: Grid, device: Device) -> KernelName:
    """The name, if there is such a kernel and it can compute what the grid asks of it.

    Raises:
        UsageError: with the kernel's own reasons.
    """
    for cell, scheme in product(grid.cells(), (*grid.schemes, "explicit")):
        dims, absorbed = cell.dims, scheme == "absorbed"
        try:
            select(
                cast(KernelName, name),
                device=device,
                dtype=DTYPES[cell.dtype],
                qk_head_dim=dims.latent_dim if absorbed else dims.qk_head_dim,
                v_head_dim=dims.kv_lora_rank if absorbed else dims.v_head_dim,
                shared_kv=absorbed,
            )
        except ValueError as error:
            raise UsageError(f"--kernel: {error}") from None
    return cast(KernelName, name)
