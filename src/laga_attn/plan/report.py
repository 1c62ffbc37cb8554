"""A plan in words: the table, the constants behind it, and the same as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from rich import box
from rich.table import Table

from laga_attn import auto
from laga_attn.plan.cost import flops_per_port_byte
from laga_attn.plan.figures import RankFigures
from laga_attn.plan.hardware import Hardware
from laga_attn.plan.step import ADAM_BYTES, StepFigures
from laga_attn.plan.sweep import USABLE_MEMORY, Row
from laga_attn.plan.workload import Candidate, Workload

__all__ = ["as_json", "assumptions", "automatic", "headline", "layer_table", "step_table"]

_GIB: Final = 2**30
_NOTES: Final = (
    "Bytes, FLOPs and tensor memory are traced from the code that trains. Kernels count by their arguments and "
    "results: what a kernel allocates for itself is not in the peak.",
    "An all-to-all goes straight from rank to rank; an all-gather goes round a ring that enters every node once.",
    "Time is an estimate from the constants below, with all overlap and with none; no figure of it was measured.",
)


def headline(workload: Workload, hardware: Hardware) -> str:
    """What is planned, in a line."""
    nodes = -(-workload.devices // workload.devices_per_node)
    sizes = f"cp {workload.cp} x tp {workload.tp} x dp {workload.dp} = {workload.devices} devices"
    on = "one node" if nodes == 1 else f"{nodes} nodes"
    return (
        f"one MLA layer, {workload.cfg.num_attention_heads} heads, {workload.seq_len:,} tokens x batch "
        f"{workload.batch}, {workload.dtype}; {sizes} on {on} of {hardware.title}"
    )


def automatic(workload: Workload, hardware: Hardware) -> str:
    """What `scheme="auto"` takes when it is told of this hardware's link, and when it is not."""

    def choice(rate: float) -> str:
        scheme, degree = auto.choose(
            workload.dims, workload.layout, causal=True, itemsize=workload.itemsize, batch=workload.batch,
            flops_per_port_byte=rate,
        )  # fmt: skip
        return f"{scheme} U={degree}"

    rate = float(f"{flops_per_port_byte(workload, hardware):.2g}")
    default = auto.flops_per_port_byte(None, "cuda", workload.itemsize)
    return (
        f'scheme="auto" takes {choice(rate)} with ContextParallel(flops_per_port_byte={rate:.0f}), which is this '
        f"hardware's, and {choice(default)} by default ({default:.0f}); it ignores memory"
    )


def layer_table(rows: Sequence[Row], best: Row | None) -> Table:
    """One row per candidate, figures of one rank for one layer."""
    numbers = (
        "port fwd\nGiB", "port bwd\nGiB", "network\nGiB", "saved\nGiB", "peak\nGiB",
        "project\nTFLOP", "rebuild\nTFLOP", "attend\nTFLOP", "ms, all\noverlap", "ms, no\noverlap", "fits",
    )  # fmt: skip
    table = _new_table("per rank and layer; * recommended", ("", "scheme", "U", "save"), numbers)
    for row in rows:
        figures = row.figures
        table.add_row(
            "*" if row is best else "",
            _scheme(row.candidate),
            str(row.candidate.ulysses_degree),
            row.candidate.save,
            *(_gib(max(figures.sent[p], figures.received[p])) for p in ("forward", "backward")),
            _gib(figures.nic_bytes),
            _gib(figures.saved_bytes),
            _gib(figures.peak_bytes),
            *(_digits(figures.part_flops(part) / 1e12) for part in ("projection", "expansion", "attention")),
            _digits(row.time.with_overlap * 1e3),
            _digits(row.time.without_overlap * 1e3),
            "yes" if row.fits else "no",
            style="bold" if row is best else None,
        )
    return table


def step_table(steps: Sequence[StepFigures], workload: Workload, hardware: Hardware) -> Table:
    """One row per candidate, figures of one rank for a step of the whole model."""
    sharers = workload.cp * workload.dp
    caption = (
        "per rank, forward and backward of all layers; sharded: parameters, gradients and "
        f"{ADAM_BYTES} bytes of optimizer per parameter cut over dp x cp = {sharers} ranks"
    )
    numbers = (
        "port\nGiB", "network\nGiB", "params\nGiB", "activations\nGiB", "peak\nGiB", "sharded\nGiB", "PFLOP",
        "s, no\noverlap", "sharded\nfits",
    )  # fmt: skip
    table = _new_table(caption, ("scheme", "U", "save"), numbers)
    for step in steps:
        sharded = step.bytes_when_sharded(sharers, workload.itemsize)
        table.add_row(
            _scheme(step.candidate),
            str(step.candidate.ulysses_degree),
            step.candidate.save,
            _gib(step.port_bytes),
            _gib(step.nic_bytes),
            _gib(step.parameter_bytes),
            _gib(step.activation_bytes),
            _gib(step.peak_bytes),
            _gib(sharded),
            _digits(step.flops / 1e15),
            _digits(step.seconds),
            "yes" if sharded <= hardware.memory_bytes * USABLE_MEMORY else "no",
        )
    return table


def _new_table(caption: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, caption=caption, caption_justify="left")
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def assumptions(hardware: Hardware, rows: Sequence[Row]) -> list[str]:
    """Every constant with its source, and what the figures take for granted."""
    lines = [*_NOTES, f"Fits: the peak is at most {USABLE_MEMORY:.0%} of the device's memory."]
    lines += [
        f"{name} = {figure.value:g} ({figure.source}, {figure.date})" for name, figure in hardware.figures().items()
    ]
    unknown = sorted({name for row in rows for name in row.figures.uncounted})
    if unknown:
        lines.append(f"operators whose FLOPs are not known, counted as 0: {', '.join(unknown)}")
    return lines


def as_json(
    workload: Workload,
    hardware: Hardware,
    rows: Sequence[Row],
    best: Row | None,
    reason: str,
    steps: Sequence[StepFigures] = (),
) -> dict[str, Any]:
    """The plan as plain values; sizes in bytes and FLOPs, times in seconds."""
    return {
        "workload": {
            **{
                field.name: getattr(workload, field.name)
                for field in dataclasses.fields(workload)
                if field.name != "cfg"
            },
            "layer": workload.cfg.to_hf(),
        },
        "hardware": dataclasses.asdict(hardware),
        "rows": [_row(row) for row in rows],
        "recommended": None if best is None else rows.index(best),
        "reason": reason,
        "auto": automatic(workload, hardware),
        "steps": [
            {
                **dataclasses.asdict(step),
                "sharded_bytes": step.bytes_when_sharded(workload.cp * workload.dp, workload.itemsize),
            }
            for step in steps
        ],
        "assumptions": assumptions(hardware, rows),
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        **dataclasses.asdict(row.candidate),
        "fits": row.fits,
        "seconds_with_overlap": row.time.with_overlap,
        "seconds_without_overlap": row.time.without_overlap,
        **_figures(row.figures),
    }


def _figures(figures: RankFigures) -> dict[str, Any]:
    """Pairs of names as keys become one name each: JSON has no tuples for keys."""
    plain = {field.name: getattr(figures, field.name) for field in dataclasses.fields(figures)}
    for name in ("flops", "hbm_bytes"):
        plain[name] = {f"{part or 'elementwise'} {phase}": value for (part, phase), value in plain[name].items()}
    plain["messages"] = [dataclasses.asdict(message) for message in figures.messages]
    return plain


def _scheme(candidate: Candidate) -> str:
    return candidate.scheme + (" 2-level" if candidate.two_level else "")


def _gib(nbytes: int) -> str:
    return _digits(nbytes / _GIB)


def _digits(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:#.3g}"
