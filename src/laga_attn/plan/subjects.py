"""What is traced: the layer that trains, or a step of a whole Hugging Face model made context-parallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from laga_attn.grid import ContextParallel
from laga_attn.kernels import KernelName
from laga_attn.module import MultiheadLatentAttention
from laga_attn.plan.figures import Message, RankFigures, figures_of
from laga_attn.plan.trace import Trace
from laga_attn.plan.workload import DTYPES, Candidate, Workload
from laga_attn.plan.world import fake_ranks
from laga_attn.traffic import Phase

__all__ = ["trace_layer", "trace_model"]

# By name: what "auto" takes depends on the machine that plans, not on the one that is planned for. As one operator that
# attends to K and V in memory, it stands for any other of that kind.
_KERNEL: Final[KernelName] = "blockwise"


def trace_layer(workload: Workload, candidate: Candidate, rank: int) -> RankFigures:
    """Forward and backward of one `MultiheadLatentAttention` on one context-parallel rank."""
    dtype = DTYPES[workload.dtype]
    degree, two_level = candidate.ulysses_degree, candidate.two_level
    with _planned(workload, rank, degree, two_level) as (cp, trace):
        layer = MultiheadLatentAttention(
            workload.layer, cp=cp, scheme=candidate.scheme, save=candidate.save, kernel=_KERNEL, dtype=dtype
        )
        layout = workload.layout
        hidden = torch.empty(
            workload.batch, layout.local_len, workload.cfg.hidden_size, dtype=dtype, requires_grad=True
        )
        trace.watch(layer.parameters(), "parameter")
        trace.watch([hidden], "input")
        out = layer(hidden, layout)
        trace.start_backward(out)
        out.backward(torch.empty_like(out))
        trace.watch([hidden.grad, *(parameter.grad for parameter in layer.parameters())], "gradient")
    figures = figures_of(trace, workload, rank)
    return replace(figures, messages=(*figures.messages, *_tensor_parallel(workload)))


def trace_model(
    hf: Mapping[str, Any], workload: Workload, candidate: Candidate, rank: int, dense: int, sparse: int
) -> RankFigures:
    """Forward and backward of a causal language model of Transformers with `dense` and `sparse` (MoE) layers.

    Routed experts run as grouped products, whose shapes do not depend on the routing. Under tensor parallelism every
    sharded width is the rank's part. The loss is not part of it: what comes down is the gradient of the logits.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from laga_attn.integrations.transformers import parallelize

    config = AutoConfig.for_model(**_shard(hf, workload.tp, dense, sparse))
    degree, two_level = candidate.ulysses_degree, candidate.two_level
    with _planned(workload, rank, degree, two_level) as (cp, trace):
        build: Any = AutoModelForCausalLM.from_config
        model = build(config, dtype=DTYPES[workload.dtype], experts_implementation="grouped_mm")
        parallelize(model, cp=cp, scheme=candidate.scheme, save=candidate.save, kernel=_KERNEL)
        trace.watch(model.parameters(), "parameter")
        layout = workload.layout
        tokens = torch.zeros(workload.batch, layout.local_len, dtype=torch.long)
        logits = model(tokens, layout=layout, use_cache=False).logits
        trace.start_backward(logits)
        logits.backward(torch.empty_like(logits))
        trace.watch([parameter.grad for parameter in model.parameters()], "gradient")
    figures = figures_of(trace, workload, rank)
    return replace(figures, messages=(*figures.messages, *_tensor_parallel(workload) * (dense + sparse)))


@contextmanager
def _planned(
    workload: Workload, rank: int, ulysses_degree: int, two_level: bool
) -> Iterator[tuple[ContextParallel, Trace]]:
    """A rank of the cluster that is planned for, on which nothing depends on the machine that plans."""
    with (
        fake_ranks(workload.cp, rank, ulysses_degree, two_level=two_level) as cp,
        FakeTensorMode(),
        Trace() as trace,
    ):
        yield cp, trace


def _shard(hf: Mapping[str, Any], tp: int, dense: int, sparse: int) -> dict[str, Any]:
    """The configuration of one tensor-parallel rank of a model with that many layers."""
    widths = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")
    config = {key: value for key, value in hf.items() if key not in ("architectures", "auto_map")}
    config |= {key: hf[key] // tp for key in widths if isinstance(hf.get(key), int)}
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * sparse
    return {**config, "num_hidden_layers": dense + sparse, "first_k_dense_replace": dense}


def _tensor_parallel(workload: Workload) -> tuple[Message, ...]:
    """A layer's two all-reduces: of its output, and of the gradients of what its column-parallel products read.

    Closed forms; they stay inside the node. Sequence parallelism moves the same bytes.
    """
    if workload.tp == 1:
        return ()
    cfg, tokens = workload.cfg, workload.batch * workload.layout.local_len
    read = cfg.kv_lora_rank + (cfg.hidden_size if cfg.q_lora_rank is None else cfg.q_lora_rank)

    def all_reduce(phase: Phase, width: int) -> Message:
        moved = 2 * (workload.tp - 1) * tokens * width * workload.itemsize // workload.tp
        return Message("tensor_parallel", "all_reduce", phase, moved, moved, moved, moved, 0, 0)

    return all_reduce("forward", cfg.hidden_size), all_reduce("backward", read)
