"""Features of Megatron-Core that touch the up-projection's weight or the order of layers."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laga_attn.integrations.megatron import rotary
from tests.compare import assert_bitwise, assert_close
from tests.integrations.megatron.models import (
    VOCABULARY,
    Batch,
    Model,
    build,
    config_of,
    finish_gradients,
    forward_backward,
    local_batch,
    spec_of,
    step_of,
    whole_parameter,
    wrap,
)
from tests.integrations.megatron.world import Parallel, megatron_ranks

BATCH = Batch(lengths=(5, 9, 14), packed=True)
TP_CP_SP = Parallel(tp=2, cp=2, sequence_parallel=True)


def accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """What Apex's kernel does: add the weight gradient of a linear to `main_grad`."""
    main_grad.add_(grad_output.t() @ total_input)


def fused_step(ctx, fused: bool):
    from megatron.core.tensor_parallel import layers

    apex = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    with (
        megatron_ranks(TP_CP_SP),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", apex, create=True),
    ):
        model = Model(options={"gradient_accumulation_fusion": fused})
        ddp = wrap(build(model, TP_CP_SP), overlap_grad_reduce=fused)
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            forward_backward(ddp, BATCH, TP_CP_SP)
        forward_backward(ddp, BATCH, TP_CP_SP)
        finish_gradients(ddp, TP_CP_SP)
        named = dict(ddp.module.named_parameters())
        assert all(p.grad is None for p in named.values()), "a gradient was left where nothing collects it"
        flags = {name for name, p in named.items() if p.grad_added_to_main_grad}
        return flags, {name: p.main_grad.clone() for name, p in named.items()}


def test_gradients_count_once_with_fused_accumulation(ranks):
    (flags, fused), (no_flags, plain) = ranks(4).run(fused_step, True)[0], ranks(4).run(fused_step, False)[0]
    # Other linears accumulate by themselves, and DDP collects the gradient of the up-projection.
    assert any("linear_proj" in name for name in flags)
    assert not any("linear_kv_up_proj" in name for name in flags)
    assert not no_flags
    for name, grad in plain.items():
        assert_close(fused[name], grad, rel=1e-5, name=name)


def delayed_step(ctx):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class DelayingLinear(ColumnParallelLinear):
        """Marks its weight as Transformer Engine does with `delay_wgrad_compute`, and has nothing to compute later."""

        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.weight.skip_backward_post_hook = True

        def register_wgrad_accumulation_and_reduce_hooks(self, hook) -> None:
            pass

        def backward_dw(self) -> None:
            raise AssertionError("there is no delayed gradient")

    with megatron_ranks(Parallel()):
        spec = spec_of(Model())
        spec.submodules.self_attention.submodules.linear_kv_up_proj = DelayingLinear
        ddp = wrap(build(Model(), Parallel(), spec), delay_wgrad_compute=True)
        ddp.zero_grad_buffer()
        forward_backward(ddp, BATCH, Parallel())
        weights = [layer.self_attention.linear_kv_up_proj.weight for layer in ddp.module.decoder.layers]
        for layer in ddp.module.decoder.layers:
            down = layer.self_attention.linear_kv_down_proj
            with mock.patch.object(down, "backward_dw", create=True) as later:
                layer.self_attention._backward_kv_proj()
                later.assert_called_once()
        return [float(weight.main_grad.abs().max()) for weight in weights]


def test_gradients_arrive_with_delayed_weight_gradients(ranks):
    assert all(largest > 0 for largest in ranks(4).run(delayed_step)[0])


def clip(ctx, model: Model, parallel: Parallel):
    """Largest logits after two micro-batches, and the weights that QK-clip leaves."""
    from megatron.core import parallel_state

    with megatron_ranks(parallel):
        ddp = wrap(build(model, parallel))
        largest = []
        for seed in (0, 1):
            forward_backward(ddp, Batch(lengths=(5, 9, 14), packed=True, seed=seed), parallel)
            if model.scheme is None:
                largest.append(ddp.module.decoder.layers[0].self_attention.core_attention.current_max_attn_logits)
        core = ddp.module.decoder.layers[0].self_attention.core_attention
        if model.scheme is None:
            core.current_max_attn_logits = torch.stack(largest).amax(0)
        logits = core.current_max_attn_logits
        dist.all_reduce(logits, op=dist.ReduceOp.MAX, group=parallel_state.get_context_parallel_group())
        heads = [torch.empty_like(logits) for _ in range(parallel.tp)]
        dist.all_gather(heads, logits, group=parallel_state.get_tensor_model_parallel_group())
        attention = ddp.module.decoder.layers[0].self_attention
        attention.clip_qk()
        assert core.current_max_attn_logits is None
        weights = [attention.linear_kv_up_proj.weight, attention.linear_q_up_proj.weight]
        return torch.cat(heads), [whole_parameter(weight, weight.data) for weight in weights]


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(cp=4), TP_CP_SP], ids=str)
def test_qk_clip_sees_the_largest_logit_of_every_head(ranks, parallel):
    options = {"qk_clip": True, "qk_clip_threshold": 2.0}
    expected, expected_weights = ranks(4).run(clip, Model(scheme=None, options=options), Parallel())[0]
    assert (expected > 2.0).any()
    for degree in (1, 2) if parallel.cp > 1 else (1,):
        logits, weights = ranks(4).run(clip, Model(ulysses_degree=degree, options=options), parallel)[0]
        assert_close(logits, expected, rel=1e-5, name="largest logits")
        for weight, expected_weight in zip(weights, expected_weights, strict=True):
            assert_close(weight, expected_weight, rel=1e-5, name="clipped weight")


def mtp_step(ctx, model: Model, parallel: Parallel):
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    with megatron_ranks(parallel):
        torch.manual_seed(1)
        config, spec = config_of(model, parallel), spec_of(model)
        gpt = GPTModel(
            config, spec, vocab_size=VOCABULARY, max_sequence_length=128, position_embedding_type="rope",
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
        )  # fmt: skip
        ddp = wrap(gpt)
        ddp.zero_grad_buffer()
        local = local_batch(Batch(), parallel)
        losses = ddp(**local.arguments, labels=local.labels, loss_mask=local.counted.float())
        share = (losses * local.counted).sum()
        share.backward()
        finalize_model_grads([ddp])
        return share.detach(), {name: whole_parameter(p, p.main_grad).clone() for name, p in gpt.named_parameters()}


@pytest.mark.parametrize("parallel", [Parallel(cp=2), TP_CP_SP], ids=str)
def test_mtp_layers(ranks, parallel):
    options = {"mtp_num_layers": 1, "calculate_per_token_loss": True}
    _, expected = ranks(4).run(mtp_step, Model(scheme=None, options=options), Parallel())[0]
    _, grads = ranks(4).run(mtp_step, Model(options=options), parallel)[0]
    assert any(name.startswith("mtp.") and "linear_kv_up_proj" in name for name in expected)
    # Gradients are summed over all data- and context-parallel ranks: each of the 4 / TP / CP replicas adds the same.
    replicas = {layout: 4 // layout.tp // layout.cp for layout in (Parallel(), parallel)}
    for name, grad in expected.items():
        assert_close(grads[name] / replicas[parallel], grad / replicas[Parallel()], rel=1e-5, name=name)


def name_in_whole_model(gpt: nn.Module, name: str) -> str:
    """A parameter of a pipeline stage as the whole model calls it."""
    kind, *rest = name.split(".", 3)
    if kind != "decoder" or rest[0] != "layers":
        return name
    number = gpt.decoder.layers[int(rest[1])].layer_number - 1
    return f"decoder.layers.{number}.{rest[2]}"


def weights_by_name(gpt: nn.Module) -> nn.Module:
    """Weights that depend on their name alone, so that a stage has those of the whole model."""
    for name, parameter in gpt.named_parameters():
        if parameter.ndim > 1:
            g = torch.Generator().manual_seed(zlib.crc32(name_in_whole_model(gpt, name).encode()))
            parameter.data.copy_(torch.randn(parameter.shape, generator=g) * 0.3)
    return gpt


def pipelined(ctx, model: Model, parallel: Parallel):
    """Loss and gradients of Megatron's schedule for two equal micro-batches."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    with megatron_ranks(parallel):
        ddp = wrap(weights_by_name(build(model, parallel)))
        ddp.zero_grad_buffer()
        batch = Batch()
        local = local_batch(batch, parallel)

        def loss(output: Tensor):
            logits = output.transpose(0, 1).contiguous().clone()
            losses = ddp.module.compute_language_model_loss(local.labels, logits)
            share = losses[local.counted].sum() / local.tokens
            return share, {"share": share.detach().clone()}  # the schedule scales the first in place

        def forward_step(iterator, module):
            return module(**local.arguments), loss

        reports = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=None, model=[ddp], num_microbatches=2,
            seq_length=batch.lengths[0], micro_batch_size=batch.rows, forward_only=False,
        )  # fmt: skip
        finish_gradients(ddp, parallel)
        gpt = ddp.module
        grads = {name_in_whole_model(gpt, name): p.main_grad.clone() for name, p in gpt.named_parameters()}
        total = sum((report["share"] for report in reports), torch.zeros(()))
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total / 2, grads


def test_pipeline_stages(ranks):
    expected_loss, expected = ranks(4).run(pipelined, Model(scheme=None), Parallel())[0]
    results = ranks(4).run(pipelined, Model(), Parallel(pp=2, cp=2))
    assert_close(max(loss for loss, _ in results), expected_loss, rel=1e-5, name="loss")
    stages = [grads.keys() for _, grads in results]
    assert not set.intersection(*map(set, stages))
    grads = {name: grad for _, stage in results for name, grad in stage.items()}
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert_close(grads[name], grad, rel=1e-5, name=name)


def fused_rotary(x, cos, sin, plain, width, slots, cp_rank, cp_size):
    """Megatron's fused kernel in plain torch: it rotates pairs of neighbours and puts all first ones before the second.

    Of documents the tables are whole, otherwise they hold the rows of this rank.
    """
    places = torch.arange(len(x))
    if slots is not None:
        chunks = [torch.arange(length).chunk(2 * cp_size) for length in slots.diff().tolist()]
        places = torch.cat([part for c in chunks for part in (c[cp_rank], c[2 * cp_size - 1 - cp_rank])])
    rows = (-1, *[1] * (x.ndim - 2), width // 2)
    (cos_left, cos_right), (sin_left, sin_right) = (
        [half.reshape(rows) for half in table[places].chunk(2, dim=-1)] for table in (cos, sin)
    )
    first, second = x[..., plain::2], x[..., plain + 1 :: 2]
    left, right = first * cos_left - second * sin_left, second * cos_right + first * sin_right
    return torch.cat([x[..., :plain], left, right], dim=-1)


def rotary_step(ctx, model: Model, batch: Batch, parallel: Parallel):
    with megatron_ranks(parallel), mock.patch.object(rotary, "FUSED_ROTARY", fused_rotary):
        return step_of(model, batch, parallel)


@pytest.mark.parametrize("batch", [Batch(), BATCH], ids=["sbhd", "thd"])
@pytest.mark.parametrize("parallel", [Parallel(cp=2), TP_CP_SP], ids=str)
def test_rotation_by_the_fused_kernel(ranks, parallel, batch):
    model = Model(rope_type="yarn")
    fused = ranks(4).run(rotary_step, model.with_(options={"apply_rope_fusion": True}), batch, parallel)[0]
    plain = ranks(4).run(rotary_step, model, batch, parallel)[0]
    assert_close(fused.logits, plain.logits, rel=1e-5, name="logits")
    for name, grad in plain.grads.items():
        assert_close(fused.grads[name], grad, rel=1e-5, name=name)


def repacked(ctx, pad_token: int):
    with megatron_ranks(Parallel(cp=2)):
        ddp = wrap(build(Model(), Parallel(cp=2)))
        ddp.zero_grad_buffer()
        local = local_batch(BATCH, Parallel(cp=2))
        local.arguments["input_ids"][:, local.rows < 0] = pad_token
        logits = ddp(**local.arguments)[:, local.rows >= 0]
        logits.square().sum().backward()
        finish_gradients(ddp, Parallel(cp=2))
        inner = [p.main_grad.clone() for n, p in ddp.module.named_parameters() if "layers.0.self_attention" in n]
        return [logits.detach(), *inner]


def test_what_pads_hold_changes_nothing(ranks):
    for one, other in zip(ranks(4).run(repacked, 3), ranks(4).run(repacked, 50), strict=True):
        for a, b in zip(one, other, strict=True):
            assert_bitwise(a, b)


def test_a_layer_is_in_no_module_list_twice(ranks):
    assert all(ranks(4).run(modules_once))


def modules_once(ctx) -> bool:
    with megatron_ranks(Parallel()):
        names = [name for name, module in build(Model(), Parallel()).named_modules() if isinstance(module, nn.Module)]
        return not any("core_attention." in name for name in names)
