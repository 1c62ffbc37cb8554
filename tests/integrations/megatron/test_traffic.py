"""What a LAGA layer moves between ranks under tensor and context parallelism, by its ledger and by a spy on torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import laga_attn as laga
from tests.integrations.megatron.models import HEADS, Batch, Model, build, forward_backward, wrap
from tests.integrations.megatron.world import Parallel, megatron_ranks

BATCH = Batch(rows=2, lengths=(32,))
ITEM = 4  # bytes of fp32


@dataclass
class Spy(TorchDispatchMode):
    """Every tensor that torch hands to a collective, with the ranks that take part."""

    messages: list[tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            leaves = tree_leaves((args, kwargs))
            groups = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf)]
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(groups[0])))
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    self.messages.append((func._schema.name, ranks, tuple(leaf.shape), leaf.dtype))
        return func(*args, **(kwargs or {}))


def observe(ctx, model: Model, parallel: Parallel):
    """The ledger of one layer's forward and backward pass, and all messages of torch."""
    from megatron.core import parallel_state

    with megatron_ranks(parallel):
        ddp = wrap(build(model, parallel))
        ddp.zero_grad_buffer()
        with laga.traffic() as ledger, Spy() as spy:
            forward_backward(ddp, BATCH, parallel)
        cp_ranks = tuple(dist.get_process_group_ranks(parallel_state.get_context_parallel_group()))
        return ledger, spy.messages, cp_ranks, parallel_state.get_context_parallel_rank()


def sizes(model: Model, parallel: Parallel) -> tuple[int, int, int, int, int]:
    """Tokens and heads per rank, widths of a query, a value and a latent."""
    tokens = BATCH.rows * BATCH.lengths[0] // parallel.cp
    return tokens, HEADS // parallel.tp, 16, 8, 28  # see models.config_of


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("scheme", ["laga", "explicit", "absorbed"])
def test_the_ledger_equals_the_formulas_when_all_ranks_exchange_heads(ranks, scheme, sequence_parallel):
    parallel = Parallel(tp=2, cp=2, sequence_parallel=sequence_parallel)
    model = Model(scheme=scheme, ulysses_degree=2, layers=2)
    s, heads, qk, v, latent = sizes(model, parallel)
    away, others = (parallel.cp - 1) / parallel.cp, parallel.cp - 1
    elements = {  # of one layer
        ("query", "forward"): s * heads * qk * away,
        ("output", "forward"): s * heads * v * away,
        ("output_grad", "backward"): s * heads * (v + 1) * away,  # with a number for the softmax
        ("query_grad", "backward"): s * heads * qk * away,
    }
    if scheme == "explicit":
        elements |= {
            ("key_value", "forward"): s * heads * (qk + v) * away,
            ("key_value_grad", "backward"): s * heads * (qk + v) * away,
        }
    else:
        elements |= {
            ("latent", "forward"): s * latent * others,
            ("latent", "backward"): s * latent * others,  # save="latent": gathered again
            ("latent_grad", "backward"): s * latent * others,
        }
    for ledger, *_ in ranks(4).run(observe, model, parallel):
        sent = dict.fromkeys(elements, 0)
        for record in ledger.select():
            sent[record.kind, record.phase] += record.sent
        assert sent == {key: model.layers * number * ITEM for key, number in elements.items()}
        assert ledger.sent() == ledger.received()


@pytest.mark.parametrize("parallel", [Parallel(cp=4), Parallel(tp=2, cp=2, sequence_parallel=True)], ids=str)
def test_without_head_exchange_only_visible_latents_travel(ranks, parallel):
    model = Model(scheme="laga", ulysses_degree=1, layers=1)
    s, *_, latent = sizes(model, parallel)
    chunk = s // 2
    results = ranks(4).run(observe, model, parallel)
    for ledger, _, _, rank in results:
        assert {record.kind for record in ledger.select()} == {"latent", "latent_grad"}
        visible = 2 * parallel.cp - rank  # chunks 0 .. 2P-1-rank, two of which are the rank's own
        for phase in ("forward", "backward"):
            assert ledger.received("latent", phase) == (visible - 2) * chunk * latent * ITEM
        assert ledger.sent("latent_grad") == ledger.received("latent", "forward")


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("degree", [1, 2])
def test_no_keys_and_values_of_heads_are_ever_communicated(ranks, sequence_parallel, degree):
    """Everything that torch sends between context-parallel ranks is accounted for: latents, and queries and outputs."""
    parallel = Parallel(tp=2, cp=2, sequence_parallel=sequence_parallel)
    model = Model(scheme="laga", ulysses_degree=degree, layers=1)
    *_, qk, v, latent = sizes(model, parallel)
    kinds, widths = {"latent", "latent_grad"}, {latent}
    if degree > 1:  # gradients of outputs bring a number for the softmax along
        kinds, widths = kinds | {"query", "output", "query_grad", "output_grad"}, widths | {qk, v, v + 1}
    for ledger, messages, cp_ranks, _ in ranks(4).run(observe, model, parallel):
        between_cp = [(op, shape, dtype) for op, group, shape, dtype in messages if group == cp_ranks]
        data = [(op, shape) for op, shape, dtype in between_cp if dtype == torch.float32]
        assert {record.kind for record in ledger.select()} == kinds
        assert {shape[-1] for _, shape in data} == widths
        # Each ledger entry is one collective with an input and an output; all else are digests of arguments.
        assert len(data) == 2 * len(ledger.select())
        assert {dtype for _, _, dtype in between_cp} == {torch.float32, torch.uint8}


def test_the_spy_sees_keys_and_values_where_they_travel(ranks):
    parallel = Parallel(tp=2, cp=2)
    _, heads, qk, v, _ = sizes(Model(), parallel)
    for _, messages, cp_ranks, _ in ranks(4).run(observe, Model(scheme="explicit", ulysses_degree=1), parallel):
        assert any(group == cp_ranks and shape[-2:] == (heads, qk + v) for _, group, shape, _ in messages)


def test_with_sequence_parallelism_rows_of_latents_cross_each_kind_of_link_once(ranks):
    """One gather over TP, then one over CP: no rank receives a row twice, in forward."""
    parallel = Parallel(tp=2, cp=2, sequence_parallel=True)
    model = Model(scheme="laga", ulysses_degree=2, layers=1)
    s, *_, latent = sizes(model, parallel)
    for ledger, messages, cp_ranks, _ in ranks(4).run(observe, model, parallel):
        width = latent // parallel.tp  # columns of the down-projection are split here
        gathers = [shape for op, group, shape, _ in messages if group != cp_ranks and "allgather" in op]
        latents = [shape for shape in gathers if shape[-1] == width]
        assert sum(map(math.prod, latents)) == s * latent + s * width  # one gather: its output and input
        assert ledger.sent("latent", "forward") == s * latent * (parallel.cp - 1) * ITEM
