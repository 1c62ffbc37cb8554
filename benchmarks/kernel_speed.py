"""Speed and error of an attention kernel of this library against PyTorch's flash attention, on CPU.

PyTorch's kernel needs equal head dims, so that its values are padded to the query's head dim, as a user would
have to. Both run on the same inputs, one after the other, again and again; every round gives one ratio, and
ratios of neighbours are what a busy machine leaves undisturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, quantiles
from typing import Annotated, cast

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import pad

from laga_attn.bench.malloc import keep_freed_memory
from laga_attn.kernels import Kernel, KernelName, select
from laga_attn.spans import Span

aten = torch.ops.aten


class Dtype(StrEnum):
    """Dtypes to measure."""

    bfloat16 = "bfloat16"
    float32 = "float32"


@dataclass(frozen=True, slots=True)
class Problem:
    """One causal self-attention layer's tensors, [1, S, H, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    scale: float

    @staticmethod
    def random(seq_len: int, heads: int, qk_head_dim: int, v_head_dim: int, dtype: torch.dtype) -> Problem:
        """Standard normal inputs."""
        g = torch.Generator().manual_seed(0)
        dims = (qk_head_dim, qk_head_dim, v_head_dim, v_head_dim)
        tensors = [torch.randn(1, seq_len, heads, d, generator=g).to(dtype) for d in dims]
        return Problem(*tensors, scale=qk_head_dim**-0.5)

    @property
    def spans(self) -> list[Span]:
        """The causal mask."""
        rows = self.q.shape[1]
        return [Span(0, rows, 0, rows, causal=True)]

    def flops(self, forward: bool) -> int:
        """FLOPs over the visible pairs alone."""
        _, _, heads, width = self.q.shape
        v_width = self.v.shape[3]
        return 2 * heads * self.spans[0].area() * ((width + v_width) if forward else (3 * width + 2 * v_width))

    def cast(self, dtype: torch.dtype) -> Problem:
        """The same values in another dtype."""
        return Problem(*(x.to(dtype) for x in (self.q, self.k, self.v, self.dout)), scale=self.scale)


class Ours:
    """The kernel under test."""

    def __init__(self, problem: Problem, kernel: Kernel) -> None:
        self.problem, self.kernel = problem, kernel

    def forward(self) -> tuple[Tensor, Tensor]:
        p = self.problem
        return self.kernel.forward(p.q, p.k, p.v, p.spans, p.scale)

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        p = self.problem
        # Neighbouring kernels derive delta themselves, so that its time counts here as well.
        delta = (p.dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2).contiguous()
        return self.kernel.backward(p.dout, delta, p.q, p.k, p.v, lse, p.spans, p.scale)


class Flash:
    """PyTorch's flash attention for CPU, values padded to the query's head dim."""

    def __init__(self, problem: Problem) -> None:
        width, self.v_width = problem.q.shape[3], problem.v.shape[3]
        self.scale = problem.scale
        self.q, self.k = problem.q.transpose(1, 2), problem.k.transpose(1, 2)
        self.v, self.dout = (pad(x, (0, width - self.v_width)).transpose(1, 2) for x in (problem.v, problem.dout))

    def forward(self) -> tuple[Tensor, Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(self.q, self.k, self.v, 0.0, True, scale=self.scale)
        return out.transpose(1, 2), lse

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            self.dout, self.q, self.k, self.v, out.transpose(1, 2), lse, 0.0, True, scale=self.scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)[..., : self.v_width]


def errors(problem: Problem, runner: Ours | Flash) -> list[float]:
    """Largest error over largest value, of out, dq, dk and dv of the first head, against float64."""
    exact = problem.cast(torch.float64)
    width, v_width = exact.q.shape[3], exact.v.shape[3]
    reference = select("reference", device="cpu", dtype=torch.float64, qk_head_dim=width, v_head_dim=v_width)
    heads = [x[:, :, :1] for x in (exact.q, exact.k, exact.v, exact.dout)]
    oracle = Ours(Problem(*heads, scale=exact.scale), reference)
    expected_out, expected_lse = oracle.forward()
    expected = (expected_out, *oracle.backward(expected_out, expected_lse))
    out, lse = runner.forward()
    actual = (out[..., :v_width], *runner.backward(out, lse))
    return [
        float((a[:, :, :1].double() - e).abs().max() / e.abs().max()) for a, e in zip(actual, expected, strict=True)
    ]


def timed(fn: Callable[[], object]) -> float:
    """Seconds that one call takes: of the thread where there is one, so that others' work does not count."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    fn()
    return clock() - start


def interleaved(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Times of each candidate, one of each in every round, after one round of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name, fn in candidates.items():
            elapsed = timed(fn)
            if turn:
                seconds[name].append(elapsed)
    return seconds


def spread(values: list[float]) -> str:
    """Median and quartiles."""
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.2f} ({low:.2f} to {high:.2f})"


def kernel_for(problem: Problem, name: KernelName) -> Kernel:
    """The kernel of this name for the problem's head dims."""
    width, v_width = problem.q.shape[3], problem.v.shape[3]
    return select(name, device="cpu", dtype=problem.q.dtype, qk_head_dim=width, v_head_dim=v_width)


def measure(problem: Problem, kernel: Kernel, repeats: int) -> list[list[str]]:
    """Table rows: pass, times, throughput, share of the matrix-product peak, speed-up."""
    keep_freed_memory()
    ours, flash = Ours(problem, kernel), Flash(problem)
    ours_state, flash_state = ours.forward(), flash.forward()
    square = torch.randn(1024, 1024).to(problem.q.dtype)
    product = torch.empty_like(square)
    seconds = interleaved(
        {
            "peak": lambda: [torch.mm(square, square, out=product) for _ in range(10)],
            "ours forward": ours.forward,
            "flash forward": flash.forward,
            "ours backward": lambda: ours.backward(*ours_state),
            "flash backward": lambda: flash.backward(*flash_state),
        },
        repeats,
    )
    for name in ("ours", "flash"):
        seconds[f"{name} both"] = [
            a + b for a, b in zip(seconds[f"{name} forward"], seconds[f"{name} backward"], strict=True)
        ]
    peak = 10 * 2 * 1024**3 / min(seconds["peak"])
    rows = []
    for label in ("forward", "backward", "both"):
        mine, theirs = seconds[f"ours {label}"], seconds[f"flash {label}"]
        flops = sum(problem.flops(f) for f in (True, False) if label in ("both", "forward" if f else "backward"))
        rows.append(
            [
                "forward + backward" if label == "both" else label,
                f"{median(theirs) * 1e3:.0f}",
                f"{median(mine) * 1e3:.0f}",
                f"{flops / min(mine) / 1e9:.0f}",
                f"{flops / min(mine) / peak:.0%}",
                spread([t / m for t, m in zip(theirs, mine, strict=True)]),
                f"{min(theirs) / min(mine):.2f}",
            ]
        )
    return rows


def main(
    seq_len: Annotated[list[int], typer.Option(help="Sequence lengths; repeat the option for several.")] = [4096],  # noqa: B006
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 16,
    qk_head_dim: Annotated[int, typer.Option(help="Head dim of queries and keys.")] = 192,
    v_head_dim: Annotated[int, typer.Option(help="Head dim of values, at most that of the queries.")] = 128,
    dtype: Annotated[list[Dtype], typer.Option(help="Dtypes; repeat the option for several.")] = [  # noqa: B006
        Dtype.bfloat16,
        Dtype.float32,
    ],
    kernel: Annotated[str, typer.Option(help="Kernel of this library; auto is what attention takes.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads of PyTorch; 0 leaves its default.")] = 0,
    repeats: Annotated[int, typer.Option(help="Rounds, after one of warm-up; at least 2.")] = 7,
    with_errors: Annotated[bool, typer.Option("--errors/--no-errors", help="Also compare with float64.")] = True,
) -> None:
    """Compare a kernel with PyTorch's flash attention: causal, one process, CPU.

    Speed-up is the median, and in brackets the quartiles, of the ratios of neighbouring runs, and once more
    that of the best runs: above 1, this library is faster. GFLOP/s and the share of the peak, that of a
    1024 x 1024 x 1024 matrix product in the same dtype, are of the best run and count the pairs under the
    causal mask only. Errors are the largest of one head over the largest value. With one thread, times are
    CPU time of the thread, which a busy machine disturbs least.
    """
    if threads:
        torch.set_num_threads(threads)
    console = Console()
    for name in dtype:
        for length in seq_len:
            problem = Problem.random(length, heads, qk_head_dim, v_head_dim, getattr(torch, name.value))
            dims = f"H = {heads}, {qk_head_dim}/{v_head_dim}"
            title = f"{name.value}, S = {length}, {dims}, {torch.get_num_threads()} threads"
            chosen = kernel_for(problem, cast(KernelName, kernel))
            table = Table(
                "", "flash, ms", f"{chosen.name}, ms", "GFLOP/s", "of peak", "speed-up", "of best", title=title
            )
            for row in measure(problem, chosen, repeats):
                table.add_row(*row)
            console.print(table)
            if with_errors:
                table = Table("error", "out", "dq", "dk", "dv")
                for label, runner in (("flash", Flash(problem)), (chosen.name, Ours(problem, chosen))):
                    table.add_row(label, *(f"{e:.1e}" for e in errors(problem, runner)))
                console.print(table)


if __name__ == "__main__":
    typer.run(main)
