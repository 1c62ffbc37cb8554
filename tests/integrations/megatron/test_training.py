"""Megatron's own DDP and optimizers train a LAGA model as they train the stock model on one rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.compare import assert_close
from tests.integrations.megatron.models import (
    Batch,
    Model,
    build,
    finish_gradients,
    forward_backward,
    whole_parameter,
    wrap,
)
from tests.integrations.megatron.world import Parallel, megatron_ranks

STEPS = 20
DOCUMENTS = (5, 9, 14)
TP_CP = Parallel(tp=2, cp=2)
TP_CP_SP = Parallel(tp=2, cp=2, sequence_parallel=True)
OVERLAPS = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 1,  # every parameter arrives by itself, when its own module is called
}


def train(ctx, model: Model, parallel: Parallel, ddp_options: dict[str, Any], steps: int = STEPS, micro: int = 1):
    """Losses and final weights of some steps with `micro` micro-batches each; three batches in turn."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with megatron_ranks(parallel):
        ddp = wrap(build(model, parallel), **ddp_options)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=3e-3, adam_eps=1e-3, clip_grad=1.0, weight_decay=0.01,
                use_distributed_optimizer=bool(ddp_options.get("use_distributed_optimizer")),
                overlap_param_gather=bool(ddp_options.get("overlap_param_gather")),
            ),
            [ddp],
        )  # fmt: skip
        losses = []
        for number in range(steps):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            loss = torch.zeros(())
            for part in range(micro):
                batch = Batch(lengths=DOCUMENTS, packed=True, seed=(number * micro + part) % 3)
                if part < micro - 1:
                    with ddp.no_sync():
                        loss += forward_backward(ddp, batch, parallel, scale=1 / micro)[1] / micro
                else:
                    loss += forward_backward(ddp, batch, parallel, scale=1 / micro)[1] / micro
            finish_gradients(ddp, parallel)
            succeeded, _, _ = optimizer.step()
            assert succeeded
            dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
            losses.append(loss)
        if ddp_options.get("overlap_param_gather"):
            ddp.disable_forward_pre_hook()
        weights = {name: whole_parameter(p, p.data).clone() for name, p in ddp.module.named_parameters()}
    return (torch.stack(losses), weights) if ctx.rank == 0 else None


@pytest.fixture(scope="module")
def stock(ranks):
    """What the stock model without any parallelism becomes in twenty steps, with and without experts."""

    @functools.cache
    def result(experts: int | None):
        return ranks(4).run(train, Model(scheme=None, experts=experts), Parallel(), {})[0]

    return result


@pytest.mark.parametrize(
    ("scheme", "parallel", "options"),
    [
        ("laga", Parallel(cp=2), {}),
        ("laga", Parallel(cp=4), OVERLAPS),
        ("explicit", TP_CP, {}),
        ("absorbed", TP_CP_SP, {}),
        ("laga", TP_CP_SP, OVERLAPS),
    ],
    ids=str,
)
def test_twenty_steps_stay_equal_to_the_stock_model(ranks, stock, scheme, parallel, options):
    experts = None if parallel == TP_CP else 4  # Megatron trains MoE under TP with sequence parallelism only
    losses, weights = ranks(4).run(train, Model(scheme=scheme, experts=experts), parallel, options)[0]
    expected_losses, expected_weights = stock(experts)
    assert expected_losses[-1] < expected_losses[0] - 0.5, "nothing was learned"
    assert_close(losses, expected_losses, rel=1e-6, name="losses")
    for name, weight in expected_weights.items():
        assert_close(weights[name], weight, rel=1e-5, name=name)


def test_micro_batches_accumulate(ranks):
    expected_losses, expected_weights = ranks(4).run(train, Model(scheme=None), Parallel(), {}, 2, 3)[0]
    losses, weights = ranks(4).run(train, Model(), TP_CP_SP, OVERLAPS, 2, 3)[0]
    assert_close(losses, expected_losses, rel=1e-6, name="losses")
    for name, weight in expected_weights.items():
        assert_close(weights[name], weight, rel=1e-5, name=name)
