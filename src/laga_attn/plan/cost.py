"""Time from figures: a roofline for what one device computes, latency and bandwidth for what it sends.

    compute  = sum over parts of max(FLOPs / (peak e), bytes / memory bandwidth)
               + elementwise bytes / memory bandwidth, but at least one launch per operator
    messages = sum over collectives of
               latency + max(bytes inside the node / link, bytes between nodes / share of the network)

Between max(compute, messages) and compute + messages lies what overlap can hide. Every constant is a figure of
`hardware.yaml`; none of it is a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from laga_attn.plan.figures import Message, RankFigures
from laga_attn.plan.hardware import Hardware
from laga_attn.plan.workload import Workload
from laga_attn.traffic import Phase

__all__ = ["TimeEstimate", "estimate_time", "flops_per_port_byte"]

_PHASES: tuple[Phase, Phase] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Seconds of forward and backward on one rank."""

    compute: float
    messages: float

    @property
    def without_overlap(self) -> float:
        return self.compute + self.messages

    @property
    def with_overlap(self) -> float:
        return max(self.compute, self.messages)


def estimate_time(figures: RankFigures, hardware: Hardware) -> TimeEstimate:
    """Time of one rank by the formulas of this module."""
    return TimeEstimate(
        compute=sum(_compute(figures, hardware, phase) for phase in _PHASES),
        messages=sum(_message(message, hardware) for message in figures.messages),
    )


def flops_per_port_byte(workload: Workload, hardware: Hardware) -> float:
    """FLOPs that a device does while a byte goes through its port: over the network once ranks leave the node.

    It is what `ContextParallel(flops_per_port_byte=)` wants to know for `scheme="auto"`.
    """
    link = hardware.node_gbps if workload.cp <= workload.ranks_per_node else hardware.nic_gbps
    computing = hardware.bf16_tflops.value * 1e12 * hardware.attention_backward_efficiency.value
    return computing / (link.value * 1e9 * hardware.link_efficiency.value)


def _compute(figures: RankFigures, hardware: Hardware, phase: Phase) -> float:
    peak = hardware.bf16_tflops.value * 1e12
    memory = hardware.memory_gbps.value * 1e9 * hardware.memory_efficiency.value
    attention = {"forward": hardware.attention_forward_efficiency, "backward": hardware.attention_backward_efficiency}
    seconds = figures.hbm_bytes.get((None, phase), 0) / memory
    for part in ("attention", "expansion", "projection"):
        efficiency = attention[phase] if part == "attention" else hardware.product_efficiency
        computing = figures.flops.get((part, phase), 0) / (peak * efficiency.value)
        seconds += max(computing, figures.hbm_bytes.get((part, phase), 0) / memory)
    return max(seconds, figures.calls.get(phase, 0) * hardware.launch_us.value * 1e-6)


def _message(message: Message, hardware: Hardware) -> float:
    link = hardware.link_efficiency.value * 1e9
    node = message.node_bytes / (hardware.node_gbps.value * link)
    nic = message.nic_bytes / (hardware.nic_gbps.value * link)
    latency = hardware.nic_latency_us if message.nic_bytes else hardware.node_latency_us
    return latency.value * 1e-6 + max(node, nic)
