"""One training step of a parallelized Transformers model, and what it must come to."""

from __future__ import annotations

from functools import cache

from torch import Tensor
from torch.nn.functional import cross_entropy

import laga_attn as laga
from laga_attn.gradients import reduce_gradients, token_mean_loss
from laga_attn.layout import SequenceLayout
from tests.compare import assert_close
from tests.integrations.mla_models import build, exact, packed_tokens, reference

LENGTHS = (19, 13)  # documents; neither divides, so every rank holds pads
EXACT = 1e-12


@cache
def expected(name: str = "deepseek_v3", lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model = build(name)
    with exact(model):
        return reference(model, lengths)


def parallel(ctx, ulysses_degree=None):
    return laga.ContextParallel(ctx.group, ulysses_degree)


def split_batch(lengths, cp):
    tokens, whole = packed_tokens(lengths)
    layout = SequenceLayout.packed(whole.cu_seqlens, cp.size)
    return layout, layout.shard_lm(tokens, cp.rank)


def loss_on(logits, labels, group):
    loss_sum = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return token_mean_loss(loss_sum, (labels != -100).sum(), group)


def step(model, cp, lengths=LENGTHS):
    """One training step: this rank's logits, its share of the loss, and gradients over all ranks."""
    layout, batch = split_batch(lengths, cp)
    logits = model(batch.input_ids, layout=layout).logits
    loss = loss_on(logits, batch.labels, cp.group)
    loss.backward()
    reduce_gradients(model, cp.group)
    return logits, loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equals(results, wanted, lengths=LENGTHS, rel=EXACT):
    logits, loss, grads = wanted
    layout = SequenceLayout.packed([sum(lengths[:n]) for n in range(len(lengths) + 1)], len(results))
    assert_close(layout.unshard([part for part, _, _ in results]), logits, rel=rel, name="logits")
    assert_close(sum(share for _, share, _ in results), loss, rel=rel, name="loss")
    for _, _, found in results:
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            assert_close(found[name], grad, rel=rel, name=name)
