"""Data parallelism, FSDP2 and LoRA around a parallelized Transformers model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laga_attn as laga
from laga_attn.gradients import reduce_gradients
from laga_attn.integrations.transformers import parallelize
from laga_attn.layout import SequenceLayout
from tests.compare import assert_close
from tests.integrations.mla_models import build, exact, packed_tokens, reference
from tests.integrations.transformers_step import (
    EXACT,
    LENGTHS,
    assert_equals,
    expected,
    loss_on,
    parallel,
    split_batch,
    step,
)


def grid_step(rank, dp_size, group, cp):
    """dp x cp ranks and two packs of documents, shared out over dp."""
    model = build()
    parallelize(model, cp=cp)
    tokens, _ = packed_tokens((*LENGTHS, *LENGTHS))
    layout = SequenceLayout.packed([0, 19, 32], cp.size)
    logits, labels = [], []
    for pack in range(rank // cp.size, 2, dp_size):
        batch = layout.shard_lm(tokens[:, 32 * pack : 32 * (pack + 1)], cp.rank)
        logits.append(model(batch.input_ids, layout=layout).logits)
        labels.append(batch.labels)
    loss_on(torch.cat(logits), torch.cat(labels), group).backward()
    reduce_gradients(model, group)
    return nn.utils.get_total_norm([p.grad for p in model.parameters()])


def grid_norms(ctx):
    norms = []
    for dp_size, cp_size in ((1, 1), (1, 2), (2, 1), (2, 2)):
        everyone = dist.new_group(list(range(dp_size * cp_size)))
        starts = range(0, dp_size * cp_size, cp_size)
        sharing = [dist.new_group(list(range(start, start + cp_size))) for start in starts]
        if ctx.rank < dp_size * cp_size:
            cp = laga.ContextParallel(sharing[ctx.rank // cp_size])
            norms.append(grid_step(ctx.rank, dp_size, everyone, cp))
    return norms


def test_gradient_norm_does_not_depend_on_how_dp_and_cp_split_the_ranks(ranks):
    norm = nn.utils.get_total_norm(list(reference(build(), (*LENGTHS, *LENGTHS))[2].values()))
    results = ranks(4).run(grid_norms)
    assert [len(norms) for norms in results] == [4, 3, 1, 1]
    for norms in results:
        for found in norms:
            assert_close(found, norm, rel=1e-6)  # the model's own norms and routers are fp32


def wrapped_step(ctx, wrapper):
    model, cp = build(), parallel(ctx)
    if wrapper == "DDP":
        wrapped = DistributedDataParallel(model, process_group=ctx.group)
    else:
        mesh = DeviceMesh.from_group(ctx.group, "cpu")
        wrapped = model
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
    parallelize(wrapped, cp=cp)
    layout, batch = split_batch(LENGTHS, cp)
    with exact(model):
        logits = wrapped(batch.input_ids, layout=layout).logits
        loss = loss_on(logits, batch.labels, ctx.group)
        (loss * ctx.size).backward()  # both average
    grads = {name: p.grad for name, p in model.named_parameters()}
    return logits, loss, {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_data_parallel_wrappers(ranks, wrapper):
    assert_equals(ranks(2).run(wrapped_step, wrapper), expected())


def lora_model(targets, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets, **options)
    model = peft.get_peft_model(build(), config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(6)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


LORA = ["q_b_proj", "o_proj", "kv_b_proj", "kv_a_proj_with_mqa"]


def lora_step(ctx, when):
    cp = parallel(ctx)
    if when == "before":
        model = lora_model(LORA)
        parallelize(model, cp=cp)
    else:
        peft = pytest.importorskip("peft")
        plain = build()
        parallelize(plain, cp=cp)
        source = lora_model(LORA)
        config = source.peft_config["default"]
        model = peft.get_peft_model(plain, config, autocast_adapter_dtype=False)
        model.load_state_dict(source.state_dict())
    with exact(model):
        trained = step(model, cp)
        layout, batch = split_batch(LENGTHS, cp)
        with torch.no_grad(), model.disable_adapter():
            return trained, model(batch.input_ids, layout=layout).logits


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_on_every_projection(ranks, when):
    model = lora_model(LORA)
    with exact(model):
        wanted = reference(model, LENGTHS)
    results = ranks(2).run(lora_step, when)
    assert_equals([trained for trained, _ in results], wanted)
    base = SequenceLayout.packed([0, 19, 32], 2).unshard([logits for _, logits in results])
    assert_close(base, expected()[0], rel=EXACT, name="adapters disabled")


def test_merged_lora_and_lora_dropout_follow_the_stock_model():
    model = lora_model(["kv_b_proj"], lora_dropout=0.5).train()
    tokens, layout = packed_tokens((16,))
    stock = copy.deepcopy(model)
    parallelize(model, cp=laga.ContextParallel.none())
    for merge in (False, True):
        for both in (model, stock):
            both.merge_adapter() if merge else None
        torch.manual_seed(0)
        wanted = stock(tokens, use_cache=False).logits
        torch.manual_seed(0)
        assert_close(model(tokens, layout=layout).logits.detach(), wanted.detach(), rel=1e-6)


@pytest.mark.parametrize("options", [{"use_dora": True}])
def test_other_adapters_on_kv_b_proj_are_refused(options):
    with pytest.raises(ValueError, match=r"Dora.*plain LoRA"):
        parallelize(lora_model(["kv_b_proj"], **options), cp=laga.ContextParallel.none())
    peft = pytest.importorskip("peft")
    other = peft.get_peft_model(build(), peft.LoHaConfig(target_modules=["kv_b_proj"]))
    with pytest.raises(ValueError, match="plain LoRA"):
        parallelize(other, cp=laga.ContextParallel.none())
