"""One rank of a cluster on one device, held against the planner: peak memory, and bytes by the ledger.

The other ranks are left out: a layer allocates what it would allocate in a cluster, for messages that nobody sends have
their sizes all the same.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from laga_attn.attention_plan import Save, Scheme
from laga_attn.bench.grid import DTYPES
from laga_attn.bench.ranks import Device
from laga_attn.config import MLAConfig
from laga_attn.module import MultiheadLatentAttention
from laga_attn.plan.subjects import trace_layer
from laga_attn.plan.trace import Trace
from laga_attn.plan.workload import Candidate, Workload
from laga_attn.plan.world import EmptyMessages, fake_ranks
from laga_attn.traffic import traffic

CLUSTER = 8
PLANNED: tuple[tuple[Scheme, int, Save], ...] = (
    ("explicit", 8, "kv"), ("explicit", 1, "latent"), ("absorbed", 8, "latent"),
    ("laga", 1, "latent"), ("laga", 2, "gathered"), ("laga", 8, "latent"), ("laga", 8, "kv"),
)  # fmt: skip


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


MIB = 2**20


def plan_lines(checks: list[PlanCheck]) -> list[str]:
    """One line for each check."""
    lines = []
    for plan in checks:
        ratio, verdict = plan.peak / plan.predicted_peak, "ok" if plan.right else f"WRONG, not {plan.predicted_port}"
        lines.append(
            f"{plan.candidate}, rank 0 of {CLUSTER}: peak {plan.peak / MIB:.1f} MiB, {ratio:.3f} of the prediction; "
            f"bytes sent and received {plan.port}: {verdict}"
        )
    return lines
