"""What one GPU can check: its kernels, memory and bytes against the planner's prediction, all schemes, time ratios.

    python -m benchmarks.device_check

1. Every kernel that the device has, against float64.
2. One rank of eight, with the others left out: a layer allocates on the GPU what it would allocate in a cluster, for
   messages that nobody sends have their sizes all the same. Its peak is held against the trace of `laga-attn plan`, its
   ledger against the traced bytes.
3. All schemes on four ranks that share the GPU, against float64 in one process.
4. The bench. Ranks on one GPU exchange tensors by gloo, through the host, for NCCL wants a GPU for each. So its times
   are those of a slow link, with computation that the ranks take turns at; only their ratios mean something.

Made to take less than four minutes, more where FlashAttention 4 has to compile first: the bench is left out where the
rest has taken two. `--device cpu --small` runs the same on any machine. Exit status 1 if a result or a byte is wrong,
2 without a GPU.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from benchmarks.kernel_check import KernelCheck, check_kernels
from rich.console import Console
from torch import Tensor
from typer import Option

from laga_attn.attention import latent_attention
from laga_attn.attention_plan import Save, Scheme
from laga_attn.bench.command import run_bench
from laga_attn.bench.grid import DTYPES, Cell, Grid
from laga_attn.bench.ranks import Device, run_on_ranks
from laga_attn.bench.report import print_report
from laga_attn.config import MLAConfig
from laga_attn.grid import ContextParallel
from laga_attn.layout import SequenceLayout
from laga_attn.module import MultiheadLatentAttention
from laga_attn.plan.subjects import trace_layer
from laga_attn.plan.trace import Trace
from laga_attn.plan.workload import Candidate, Workload
from laga_attn.plan.world import EmptyMessages, fake_ranks
from laga_attn.traffic import traffic

CASES = (("explicit", 1), ("explicit", 2), ("explicit", 4), ("absorbed", 2), ("laga", 1), ("laga", 2), ("laga", 4))
RANKS = 4
MIB = 2**20
WORSE = 1.5
"""How much worse than one process a result may be, whose sums are taken in another order ..."""
ALWAYS_RIGHT = 2e-6
"""... and an error that is right in any case."""


CLUSTER = 8
PLANNED: tuple[tuple[Scheme, int, Save], ...] = (
    ("explicit", 8, "kv"), ("explicit", 1, "latent"), ("absorbed", 8, "latent"),
    ("laga", 1, "latent"), ("laga", 2, "gathered"), ("laga", 8, "latent"), ("laga", 8, "kv"),
)  # fmt: skip
BENCH_STARTS_BEFORE = 120.0
"""Seconds from the start."""


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """A layer on one rank of `CLUSTER`: what was predicted and what came, in bytes; port bytes are sent, received."""

    candidate: str
    predicted_peak: int
    peak: int
    predicted_port: tuple[int, int]
    port: tuple[int, int]

    @property
    def right(self) -> bool:
        """Of bytes on the wire none may be missing. Memory has a kernel's own scratch in it, which no trace knows."""
        return self.port == self.predicted_port


def check_plan(device: Device, small: bool) -> list[PlanCheck]:
    """Every configuration of `PLANNED`."""
    cfg = MLAConfig.preset("tiny" if small else "deepseek-v3")
    work = Workload(cfg, 2048 if small else 65536, CLUSTER)
    return [check_one_plan(work, Candidate(*planned), device) for planned in PLANNED]


def check_one_plan(work: Workload, candidate: Candidate, device: Device) -> PlanCheck:
    """Trace rank 0 without data, then run it with data."""
    figures = trace_layer(work, candidate, 0)
    peak, port = run_layer(work, candidate, device)
    predicted = (sum(figures.sent.values()), sum(figures.received.values()))
    return PlanCheck(str(candidate), figures.peak_bytes, peak, predicted, port)


def run_layer(work: Workload, candidate: Candidate, device: Device) -> tuple[int, tuple[int, int]]:
    """Peak bytes and (sent, received) of one step of a layer on rank 0, parameters, inputs and gradients counted.

    On a CPU, whose allocator keeps no books, the planner's tracer counts.
    """
    with fake_ranks(work.cp, 0, candidate.ulysses_degree) as cp, EmptyMessages(), ExitStack() as stack:
        tracer = None if device == "cuda" else stack.enter_context(Trace())
        layer = MultiheadLatentAttention(
            work.layer, cp=cp, scheme=candidate.scheme, save=candidate.save, dtype=DTYPES[work.dtype],
            kernel="auto" if device == "cuda" else "blockwise",
        ).to(device)  # fmt: skip
        shape = (work.batch, work.layout.local_len, work.cfg.hidden_size)
        hidden = torch.zeros(shape, dtype=DTYPES[work.dtype], device=device, requires_grad=True)
        leaves = [hidden, *layer.parameters()]

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            out = layer(hidden, work.layout)
            out.backward(torch.empty_like(out))

        if tracer is not None:
            tracer.watch(leaves, "input")
            with traffic() as ledger:
                step()
            return tracer.memory.peak().nbytes, (ledger.sent(), ledger.received())
        step()  # libraries make themselves comfortable once
        for leaf in leaves:
            leaf.grad = None
        others = torch.cuda.memory_allocated() - sum(leaf.nbytes for leaf in leaves)
        torch.cuda.reset_peak_memory_stats()
        with traffic() as ledger:
            step()
        return torch.cuda.max_memory_allocated() - others, (ledger.sent(), ledger.received())


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
    """Check kernels, predictions, all schemes on several ranks, and their times, on one device."""
    console, started = Console(), time.perf_counter()
    where = cast(Device, device)
    if where == "cuda" and not torch.cuda.is_available():
        typer.echo(
            "device_check needs a CUDA GPU, and this PyTorch sees none; "
            "--device cpu --small runs the same checks without one",
            err=True,
        )
        raise typer.Exit(2)
    kernels = list(check_kernels(torch.device(where), small))
    for line in kernel_lines(kernels):
        console.print(line, soft_wrap=True)
    plans = check_plan(where, small)
    for plan in plans:
        ratio, verdict = plan.peak / plan.predicted_peak, "ok" if plan.right else f"WRONG, not {plan.predicted_port}"
        console.print(
            f"{plan.candidate}, rank 0 of {CLUSTER}: peak {plan.peak / MIB:.1f} MiB, {ratio:.3f} of the prediction; "
            f"bytes sent and received {plan.port}: {verdict}"
        )
    checks = check_schemes(where, small)
    for check in checks:
        verdict = "ok" if check.right else "WRONG"
        console.print(
            f"{check.scheme} U={check.ulysses_degree} {check.dtype}: error {check.error:.1e}, "
            f"one process {check.alone:.1e}: {verdict}"
        )
    numbers: dict[str, Any] = {
        "kernels": [asdict(check) for check in kernels],
        "plans": [asdict(plan) for plan in plans],
        "schemes": [asdict(check) for check in checks],
    }
    if time.perf_counter() - started < BENCH_STARTS_BEFORE:
        sizes = (64, 2) if small else (8192, 16)
        grid = Grid(
            (2,), sizes[:1], sizes[1:], ("bf16",), ("explicit", "laga", "absorbed"), None, ("latent", "kv"), rounds=3
        )
        report = run_bench(grid, [], device=where)
        print_report(report, console)
        numbers["bench"] = asdict(report)
    else:
        console.print("the bench is left out: time is up")
    console.print(f"{time.perf_counter() - started:.0f} s")
    if output is not None:
        output.write_text(json.dumps(numbers, indent=1) + "\n")
    sys.exit(not all(check.right for check in (*kernels, *plans, *checks)))


if __name__ == "__main__":
    typer.run(main)
