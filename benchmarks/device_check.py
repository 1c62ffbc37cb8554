"""All kernels of one GPU, the planner's prediction for it, and all schemes on several ranks: results, memory, ratios.

    python -m benchmarks.device_check

Ranks on one GPU exchange tensors by gloo, through the host, for NCCL wants a GPU for each. So the times of the bench
are those of a slow link, with computation that the ranks take turns at; only their ratios mean something. Takes a few
minutes on one GPU, and more where FlashAttention 4 has to compile first; `--device cpu --small` runs the same on any
machine. Exit status 1 if a result or a byte is wrong, 2 without a GPU.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from benchmarks.kernel_check import KernelCheck, check_kernels
from benchmarks.plan_check import check_plan, plan_lines
from rich.console import Console
from torch import Tensor
from typer import Option

from laga_attn.attention import latent_attention
from laga_attn.bench.command import run_bench
from laga_attn.bench.grid import DTYPES, Cell, Grid
from laga_attn.bench.ranks import Device, run_on_ranks
from laga_attn.bench.report import print_report
from laga_attn.grid import ContextParallel
from laga_attn.layout import SequenceLayout

CASES = (("explicit", 1), ("explicit", 2), ("explicit", 4), ("absorbed", 2), ("laga", 1), ("laga", 2), ("laga", 4))
RANKS = 4
WORSE = 1.5
"""How much worse than one process a result may be, whose sums are taken in another order ..."""
ALWAYS_RIGHT = 2e-6
"""... and an error that is right in any case."""


@dataclass(frozen=True, slots=True)
class SchemeCheck:
    """Largest relative errors of output and gradients against fp64 in one process, over all ranks."""

    scheme: str
    ulysses_degree: int
    dtype: str
    error: float
    alone: float  # of explicit attention in one process with the same dtype

    @property
    def right(self) -> bool:
        return self.error <= max(ALWAYS_RIGHT, WORSE * self.alone)


def check_schemes(device: Device, small: bool) -> list[SchemeCheck]:
    """Every case of `CASES` in fp32 and bf16."""
    cell = Cell(RANKS, 61 if small else 1021, 4 if small else 16, "fp64")  # lengths that need pads
    by_rank = run_on_ranks(scheme_errors, RANKS, cell, device, device=device)
    return [
        SchemeCheck(scheme, degree, dtype, max(errors[scheme, degree, dtype][0] for errors in by_rank), alone)
        for (scheme, degree, dtype), (_, alone) in by_rank[0].items()
    ]


def scheme_errors(cell: Cell, device: Device) -> dict[tuple[str, int, str], tuple[float, float]]:
    """On one rank: the errors of each case, and of one process."""
    group = dist.group.WORLD
    assert group is not None
    layout, alone = cell.layout, SequenceLayout.zigzag(cell.seq_len, 1)
    generator = torch.Generator().manual_seed(0)
    heads, up = cell.num_heads, cell.dims.up_head_dim
    shapes = {"q": (heads, 192), "c_kv": (512,), "k_rope": (64,), "dout": (heads, 128)}
    whole = {name: torch.randn(1, cell.seq_len, *shape, generator=generator) for name, shape in shapes.items()}
    weight = torch.randn(heads * up, 512, generator=generator) / 512**0.5

    def shard(tensor: Tensor) -> Tensor:
        return layout.shard(tensor, dist.get_rank(), dim=1)

    def on(dtype: str, part: Any, cp: ContextParallel, scheme: str, layout: SequenceLayout) -> list[Tensor]:
        """Output and all gradients; those of the weight summed over ranks."""
        place = partial(torch.Tensor.to, device=device, dtype=DTYPES[dtype])
        q, c_kv, k_rope, dout = (place(part(tensor)) for tensor in whole.values())
        inputs = [tensor.requires_grad_() for tensor in (q, c_kv, k_rope, place(weight))]
        out = latent_attention(
            *inputs, layout=layout, cp=cp, scheme=scheme, qk_nope_head_dim=128, v_head_dim=128
        )  # fmt: skip
        *grads, d_weight = torch.autograd.grad(out, inputs, dout)
        d_weight = d_weight.double()
        if cp.size > 1:
            dist.all_reduce(d_weight)
        return [out.detach().double(), *(grad.double() for grad in grads), d_weight]

    def everything(tensor: Tensor) -> Tensor:
        return tensor

    exact = on("fp64", everything, ContextParallel.none(), "explicit", alone)
    local = [*(shard(tensor) for tensor in exact[:-1]), exact[-1]]
    results = {}
    for dtype in ("fp32", "bf16"):
        single = _worst(on(dtype, everything, ContextParallel.none(), "explicit", alone), exact)
        for scheme, degree in CASES:
            actual = on(dtype, shard, ContextParallel(group, degree), scheme, layout)
            results[scheme, degree, dtype] = _worst(actual, local), single
    return results


def _worst(actual: list[Tensor], expected: list[Tensor]) -> float:
    errors = [float((a - e).abs().max() / e.abs().max()) for a, e in zip(actual, expected, strict=True)]
    return max(error if error == error else float("inf") for error in errors)


def kernel_lines(checks: list[KernelCheck]) -> list[str]:
    """The worst check of each kernel and dtype, and every wrong one."""
    worst: dict[tuple[str, str], KernelCheck] = {}
    for check in checks:
        key = check.kernel, check.dtype
        worst[key] = max(worst.get(key, check), check, key=lambda c: c.error)
    shown = [*worst.values(), *(check for check in checks if not check.right and check not in worst.values())]
    return [
        f"{check.kernel} {check.dtype}: error {check.error:.1e} ({check.mask}, {check.dims[0]}/{check.dims[1]}): "
        + ("ok" if check.right else f"WRONG {check.failure}".strip())
        for check in shown
    ]


def main(
    device: Annotated[str, Option(metavar="cuda|cpu", help="Where the ranks compute.")] = "cuda",
    small: Annotated[bool, Option("--small", help="Sizes for a machine without a GPU.")] = False,
    output: Annotated[Path | None, Option("--json", help="File for all numbers.")] = None,
) -> None:
    """Check all kernels of one device, and all schemes with several ranks on it."""
    console, started = Console(), time.perf_counter()
    where = cast(Device, device)
    if where == "cuda" and not torch.cuda.is_available():
        typer.echo(
            "device_check.py needs a CUDA GPU, and this PyTorch sees none; "
            "--device cpu --small runs the same checks without one",
            err=True,
        )
        raise typer.Exit(2)
    plans = check_plan(where, small)
    for line in plan_lines(plans):
        console.print(line, soft_wrap=True)
    kernels = list(check_kernels(torch.device(where), small))
    for line in kernel_lines(kernels):
        console.print(line, soft_wrap=True)
    checks = check_schemes(where, small)
    for check in checks:
        verdict = "ok" if check.right else "WRONG"
        console.print(
            f"{check.scheme} U={check.ulysses_degree} {check.dtype}: error {check.error:.1e}, "
            f"one process {check.alone:.1e}: {verdict}"
        )
    sizes = (64, 2) if small else (8192, 16)
    grid = Grid(
        (2,), sizes[:1], sizes[1:], ("bf16",), ("explicit", "laga", "absorbed"), None, ("latent", "kv"), rounds=5
    )
    report = run_bench(grid, [], device=where)
    print_report(report, console)
    console.print(f"{time.perf_counter() - started:.0f} s")
    if output is not None:
        numbers = {
            "plans": [asdict(check) for check in plans],
            "kernels": [asdict(check) for check in kernels],
            "schemes": [asdict(check) for check in checks],
            "bench": asdict(report),
        }
        output.write_text(json.dumps(numbers, indent=1) + "\n")
    sys.exit(not all(check.right for check in (*plans, *kernels, *checks)))


if __name__ == "__main__":
    typer.run(main)
