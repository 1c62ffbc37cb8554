"""A step of a whole model: few layers traced, many computed.

Decoder layers of a kind are alike, so every figure of a model with n of them grows by the same amount per layer. Models
with one layer of each kind, and with one more of each, give that amount; `tests/plan` checks it against a whole trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from laga_attn.plan.cost import estimate_time
from laga_attn.plan.figures import RankFigures
from laga_attn.plan.hardware import Hardware
from laga_attn.plan.subjects import trace_model
from laga_attn.plan.workload import Candidate, Workload
from laga_attn.train.errors import UsageError

__all__ = ["ADAM_BYTES", "StepFigures", "layers_of", "trace_step"]

ADAM_BYTES: Final = 12
"""Optimizer bytes per parameter: an fp32 copy and Adam's two moments."""

Trace = Callable[[Mapping[str, Any], Workload, Candidate, int, int, int], RankFigures]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Forward and backward of a whole model on one rank, parameters and gradients not sharded; bytes, FLOPs, seconds.

    `peak_bytes` holds parameters and gradients, but no optimizer states; `activation_bytes` is the peak of all else.
    """

    candidate: Candidate
    layers: int
    parameter_bytes: int
    saved_bytes: int
    peak_bytes: int
    activation_bytes: int
    port_bytes: int
    nic_bytes: int
    flops: int
    seconds: float  # without overlap

    def bytes_when_sharded(self, ranks: int, itemsize: int) -> int:
        """What a rank holds when parameters, gradients and optimizer states are cut over `ranks`, as FSDP does.

        A layer that is gathered to compute with comes on top: the average one, for parameters and gradients.
        """
        states = 2 * self.parameter_bytes + self.parameter_bytes // itemsize * ADAM_BYTES
        return self.activation_bytes + states // ranks + 2 * self.parameter_bytes // self.layers


def layers_of(hf: Mapping[str, Any]) -> tuple[int, int]:
    """Decoder layers with a dense MLP and with routed experts."""
    layers = hf.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        raise UsageError(f"--model-step needs num_hidden_layers in the model's config, got {layers!r}")
    if not isinstance(hf.get("model_type"), str):
        raise UsageError("--model-step needs model_type in the model's config, such as deepseek_v3")
    if not hf.get("n_routed_experts"):
        return layers, 0
    by_layer = hf.get("mlp_layer_types")
    dense = hf.get("first_k_dense_replace", 0) if by_layer is None else by_layer.count("dense")
    return min(layers, dense), max(0, layers - dense)


def trace_step(
    hf: Mapping[str, Any],
    workload: Workload,
    candidate: Candidate,
    hardware: Hardware,
    rank: int = 0,
    trace: Trace = trace_model,
) -> StepFigures:
    """Figures of all layers from traces of models with one or two of each kind."""
    dense, sparse = layers_of(hf)
    first = (min(dense, 1), min(sparse, 1))
    base = trace(hf, workload, candidate, rank, *first)
    steps = [
        (count - 1, trace(hf, workload, candidate, rank, first[0] + (kind == 0), first[1] + (kind == 1)))
        for kind, count in enumerate((dense, sparse))
        if count > 1
    ]

    def whole(value: Callable[[RankFigures], Any]) -> Any:
        return value(base) + sum(count * (value(more) - value(base)) for count, more in steps)

    return StepFigures(
        candidate=candidate,
        layers=dense + sparse,
        parameter_bytes=whole(lambda figures: figures.parameter_bytes),
        saved_bytes=whole(lambda figures: figures.saved_bytes),
        peak_bytes=whole(lambda figures: figures.peak_bytes),
        activation_bytes=whole(lambda figures: figures.activation_bytes),
        port_bytes=whole(lambda figures: figures.port_bytes),
        nic_bytes=whole(lambda figures: figures.nic_bytes),
        flops=whole(lambda figures: figures.total_flops),
        seconds=whole(lambda figures: estimate_time(figures, hardware).without_overlap),
    )
