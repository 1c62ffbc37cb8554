"""Checkpoints move between stock and LAGA models, and between parallel sizes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.compare import assert_bitwise, assert_close
from tests.integrations.megatron.models import Batch, Model, build, forward_backward, whole_parameter, wrap
from tests.integrations.megatron.world import Parallel, megatron_ranks

BATCH = Batch(lengths=(5, 9, 14), packed=True)
STOCK, LAGA = Model(scheme=None, experts=4), Model(experts=4)
TP_CP = Parallel(tp=2, cp=2, sequence_parallel=True)


class Threads:
    """Megatron writes checkpoints from child processes, which the pool's workers may not have."""

    Queue = JoinableQueue = queue.Queue
    Process = threading.Thread

    def Manager(self) -> Threads:
        return self


@contextmanager
def writing_from_threads() -> Iterator[None]:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    processes = SimpleNamespace(get_context=lambda _: Threads())
    with (
        mock.patch.object(filesystem_async, "mp", processes),
        mock.patch.object(filesystem_async, "_results_queue", None),
    ):
        yield


def visit(ctx, model: Model, parallel: Parallel, load: str | None, save: str | None, with_loss: bool):
    """Build a model, load and save a distributed checkpoint; its whole weights, keys and loss on one batch."""
    from megatron.core import dist_checkpointing, parallel_state

    with megatron_ranks(parallel):
        gpt = build(model, parallel)
        if load is None:
            with torch.no_grad():
                for number, parameter in enumerate(gpt.parameters()):
                    parameter += 0.01 * (number % 5)  # not what a newly built model has
        else:
            gpt.load_state_dict(dist_checkpointing.load(gpt.sharded_state_dict(), load))
        if save is not None:
            with writing_from_threads():
                dist_checkpointing.save(gpt.sharded_state_dict(), save)
        weights = {name: whole_parameter(p, p.data).clone() for name, p in gpt.named_parameters()}
        loss = None
        if with_loss:
            loss = forward_backward(wrap(gpt), BATCH, parallel)[1]
            dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
        return weights, sorted(gpt.state_dict()), sorted(gpt.sharded_state_dict()), loss


def assert_same_weights(actual, expected):
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert_bitwise(actual[name], weight, name=name)


@pytest.mark.parametrize(("first", "second"), [(TP_CP, Parallel(cp=4)), (Parallel(cp=4), TP_CP)], ids=str)
def test_stock_to_laga_to_stock_across_parallel_sizes(ranks, tmp_path, first, second):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    stock, keys, sharded_keys, _ = ranks(4).run(visit, STOCK, first, None, str(a), False)[0]
    laga, laga_keys, laga_sharded_keys, loss = ranks(4).run(visit, LAGA, second, str(a), str(b), True)[0]
    assert_same_weights(laga, stock)
    assert (laga_keys, laga_sharded_keys) == (keys, sharded_keys)
    assert_same_weights(ranks(4).run(visit, STOCK, first, str(b), None, False)[0][0], stock)
    _, _, _, stock_loss = ranks(4).run(visit, STOCK, Parallel(), str(b), None, True)[0]
    assert_close(loss, stock_loss, rel=1e-6, name="loss")


def plain_state(ctx, source: Model, target: Model):
    with megatron_ranks(Parallel()):
        state = build(source, Parallel()).state_dict()
        # Transformer Engine's core attention has an entry of its own in checkpoints.
        state["decoder.layers.0.self_attention.core_attention._extra_state"] = torch.zeros(0)
        model = build(target, Parallel())
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_state_dict(state)
        return all(torch.equal(p, state[name]) for name, p in model.named_parameters())


def test_plain_state_dicts_load_strictly(ranks):
    assert all(ranks(4).run(plain_state, STOCK, LAGA))
