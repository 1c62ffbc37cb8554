"""`laga-attn doctor`: what this machine offers, and whether attention over two ranks is right on it."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from laga_attn.attention import latent_attention
from laga_attn.bench.ranks import run_on_ranks
from laga_attn.grid import ContextParallel
from laga_attn.kernels import support_table
from laga_attn.layout import SequenceLayout

__all__ = ["SELF_TEST_CASES", "doctor", "self_test", "worst_error"]

_RANKS, _HEADS, _NOPE, _ROPE, _VALUE, _LATENT = 2, 4, 16, 8, 16, 32
_TOLERANCE = 1e-12  # fp64; what differs between schemes is the order of sums

SELF_TEST_CASES = (("explicit", 1), ("explicit", 2), ("absorbed", 2), ("laga", 1), ("laga", 2))


def doctor() -> None:
    """Show what this machine offers, and test attention over two ranks of it.

    The self-test starts two processes and compares output and gradients of every scheme with attention in a
    single process, in fp64. Exit status 1 if anything differs.
    """
    console = Console()
    console.print(_environment())
    for device in _devices():
        console.print(_kernels(device))
    started = time.perf_counter()
    try:
        errors = self_test()
    except Exception as error:
        console.print(f"[red]self-test failed[/red]: two local processes could not run it: {error}", soft_wrap=True)
        raise typer.Exit(1) from error
    table = Table(title=f"self-test: {_RANKS} ranks against one process, fp64", title_justify="left")
    for column in ("scheme", "ulysses_degree", "largest relative error", "result"):
        table.add_column(column)
    for (scheme, degree), worst in errors.items():
        result = "[green]ok[/green]" if worst <= _TOLERANCE else f"[red]above {_TOLERANCE:g}[/red]"
        table.add_row(scheme, str(degree), f"{worst:.1e}", result)
    console.print(table)
    failed = [case for case, worst in errors.items() if not worst <= _TOLERANCE]  # NaN fails too
    seconds = time.perf_counter() - started
    if failed:
        console.print(f"[red]self-test failed[/red] for {', '.join(f'{s} U={u}' for s, u in failed)}")
        raise typer.Exit(1)
    console.print(f"[green]self-test passed[/green] in {seconds:.1f} s")


def self_test() -> dict[tuple[str, int], float]:
    """The largest relative error of each case of `SELF_TEST_CASES` against one process, over all ranks.

    Raises:
        Exception: a process could not be started or could not finish.
    """
    per_rank = run_on_ranks(_self_test_rank, _RANKS)
    return {case: max(errors[case] for errors in per_rank) for case in SELF_TEST_CASES}


def worst_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest of `max|a - e| / max|e|` over pairs of tensors; infinite where anything is not finite."""
    errors = [float((a - e).abs().max() / e.abs().max()) for a, e in zip(actual, expected, strict=True)]
    return max(error if error == error else float("inf") for error in errors)


def _self_test_rank() -> dict[tuple[str, int], float]:
    world = dist.group.WORLD
    assert world is not None
    layout = SequenceLayout.zigzag(61, _RANKS)  # a length that needs pads
    alone = _forward_backward("explicit", ContextParallel.none(), SequenceLayout.zigzag(61, 1), lambda t: t)
    shard = partial(layout.shard, rank=dist.get_rank(), dim=1)
    expected = [shard(tensor) for tensor in alone[:-1]] + alone[-1:]
    errors = {}
    for scheme, degree in SELF_TEST_CASES:
        cp = ContextParallel(world, degree)
        actual = _forward_backward(scheme, cp, layout, shard)
        dist.all_reduce(actual[-1])
        errors[scheme, degree] = worst_error(actual, expected)
    return errors


def _forward_backward(
    scheme: str, cp: ContextParallel, layout: SequenceLayout, shard: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """`out, dq, dc_kv, dk_rope, dW` of one call on this rank's part of fixed random inputs."""
    generator = torch.Generator().manual_seed(0)
    random = partial(torch.randn, generator=generator, dtype=torch.float64)
    whole = (random(1, 61, _HEADS, _NOPE + _ROPE), random(1, 61, _LATENT), random(1, 61, _ROPE))
    weight = random(_HEADS * (_NOPE + _VALUE), _LATENT).requires_grad_()
    gradient = random(1, 61, _HEADS, _VALUE)
    q, c_kv, k_rope = (shard(tensor).requires_grad_() for tensor in whole)
    out = latent_attention(
        q, c_kv, k_rope, weight, layout=layout, cp=cp, scheme=scheme, qk_nope_head_dim=_NOPE, v_head_dim=_VALUE
    )
    gradients = torch.autograd.grad(out, (q, c_kv, k_rope, weight), shard(gradient))
    return [out.detach(), *gradients]


def _environment() -> Table:
    table = Table(title="this machine", title_justify="left", show_header=False)
    for name, value in _facts():
        table.add_row(name, value)
    return table


def _facts() -> Iterator[tuple[str, str]]:
    yield "laga-attn", importlib.metadata.version("laga-attn")
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "torch", torch.__version__
    for package in ("transformers", "safetensors", "matplotlib"):
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed; needed by train and demo: pip install 'laga-attn[train]'"
    yield "CPU", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield f"CUDA device {index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    else:
        yield "CUDA", "no device"
    yield "gloo (CPU ranks)", "yes" if dist.is_gloo_available() else "no: torch was built without it"
    yield "nccl (CUDA ranks)", "yes" if dist.is_nccl_available() else "no: torch was built without it"


def _devices() -> list[torch.device]:
    return [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()


def _kernels(device: torch.device) -> Table:
    """Every kernel, and whether it computes the head sizes of DeepSeek-V3 in bf16 on `device`."""
    table = Table(title=f"kernels on {device.type}, bf16, head dims of DeepSeek-V3", title_justify="left")
    for column in ("kernel", "how", "in head space (192/128)", "in latent space (576/512)"):
        table.add_column(column)
    head_space = support_table(device=device, dtype=torch.bfloat16, qk_head_dim=192, v_head_dim=128)
    latent_space = support_table(device=device, dtype=torch.bfloat16, qk_head_dim=576, v_head_dim=512, shared_kv=True)
    for head_row, latent_row in zip(head_space, latent_space, strict=True):
        table.add_row(head_row["kernel"], head_row["how"], head_row["usable"], latent_row["usable"])
    return table
