"""`verify` compares with the stock layer where it can, leaves no trace, and finds faults."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from laga_attn.integrations.megatron import Verification, verify, with_laga
from laga_attn.integrations.megatron import core_attention as core_module
from laga_attn.integrations.megatron.features import process_groups
from tests.integrations.megatron.models import Batch, Model, build, forward_backward, local_batch, spec_of, wrap
from tests.integrations.megatron.world import Parallel, megatron_ranks

BATCH = Batch(lengths=(5, 9, 14), packed=True)


def verified(ctx, model: Model, parallel: Parallel, with_stock: bool, wrapped: bool, broken: bool = False):
    with megatron_ranks(parallel):
        spec = spec_of(model.with_(scheme=None)) if with_stock else spec_of(model)
        gpt = build(model, parallel, with_laga(spec, scheme=model.scheme) if with_stock else spec)
        outer = wrap(gpt) if wrapped else gpt
        local = local_batch(BATCH, parallel)
        batch = {**local.arguments, "labels": local.labels}
        layer = gpt.decoder.layers[0].self_attention
        gpt.decoder.layers[1].eval()  # a frozen part
        core = layer.core_attention
        core.current_max_attn_logits = torch.full((1,), -7.0)  # of the micro-batches so far
        modes = [module.training for module in gpt.modules()]
        before = type(layer), core, core.options, core.current_max_attn_logits
        if broken:
            scheme, original = model.scheme, core_module.latent_attention

            def wrong(*arguments, **options):
                out = original(*arguments, **options)
                return 0.9 * out if options["scheme"] == scheme else out

            with mock.patch.object(core_module, "latent_attention", wrong):
                result = verify(outer, batch, local.counted)
        else:
            result = verify(outer, batch, local.counted)
        core = layer.core_attention
        assert (type(layer), core, core.options, core.current_max_attn_logits) == before
        assert [module.training for module in gpt.modules()] == modes
        assert all(p.grad is None and not torch.count_nonzero(getattr(p, "main_grad", torch.zeros(1)))
                   for p in gpt.parameters())  # fmt: skip
        if wrapped:
            share = forward_backward(outer, BATCH, parallel)[1]
            torch.distributed.all_reduce(share, group=process_groups(layer).cp)
            assert float(share) == pytest.approx(result.loss, rel=1e-6), "the model runs as before"
        return result


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_stock_layer_is_the_reference_where_it_can_be_built(ranks, wrapped):
    result = ranks(4).run(verified, Model(experts=4), Parallel(), True, wrapped)[0]
    assert result.reference == "the stock layer with PlainAttention"
    assert 0 < result.loss_error + result.gradient_error < 1e-5
    assert any("linear_kv_up_proj" in name for name in result.gradients)


@pytest.mark.parametrize("parallel", [Parallel(cp=4), Parallel(tp=2, cp=2, sequence_parallel=True)], ids=str)
def test_the_explicit_scheme_is_the_reference_elsewhere(ranks, parallel):
    for result in ranks(4).run(verified, Model(), parallel, False, True):
        assert result.reference.startswith("LAGA's explicit scheme, because the stock core attention cannot be built")
        assert 0 < result.loss_error + result.gradient_error < 1e-5


@pytest.mark.parametrize("with_stock", [True, False])
def test_a_fault_shows(ranks, with_stock):
    result = ranks(4).run(verified, Model(), Parallel(), with_stock, False, True)[0]
    assert result.loss_error > 1e-3
    assert result.gradient_error > 1e-2


def test_the_report_names_the_worst_parameters():
    report = str(Verification("X", 2.0, 2.5, {f"p{i}": 10.0**-i for i in range(9)})).splitlines()
    assert report[0] == "reference: X"
    assert report[1].endswith("relative error 2.0e-01")
    assert [line.split() for line in report[3:]] == [[f"1.0e-0{i}" if i else "1.0e+00", f"p{i}"] for i in range(5)]


def broken_gradient(ctx, kind: str) -> dict[str, float]:
    """Errors when backward gives one parameter NaN, or nothing, on the second run."""
    with megatron_ranks(Parallel()):
        gpt = build(Model(), Parallel())
        local = local_batch(BATCH, Parallel())
        weight, calls = gpt.decoder.layers[0].self_attention.linear_kv_up_proj.weight, []

        def spoil(parameter: torch.Tensor) -> None:
            calls.append(parameter)
            if len(calls) == 2:
                parameter.grad = None if kind == "missing" else parameter.grad * float("nan")

        weight.register_post_accumulate_grad_hook(spoil)
        result = verify(gpt, {**local.arguments, "labels": local.labels}, local.counted)
        assert len(calls) == 2
        return result.gradients | {"worst": result.gradient_error}


@pytest.mark.parametrize("kind", ["nan", "missing"])
def test_gradients_that_are_missing_or_not_finite_are_infinitely_wrong(ranks, kind):
    errors = ranks(4).run(broken_gradient, kind)[0]
    assert errors.pop("worst") == math.inf
    assert [name for name, error in errors.items() if error > 1e-5] == [
        "decoder.layers.0.self_attention.linear_kv_up_proj.weight"
    ]


def refused(ctx, scheme: str | None, parallel: Parallel, batch: dict[str, torch.Tensor]) -> None:
    with megatron_ranks(parallel):
        verify(build(Model(scheme=scheme), parallel), batch)


@pytest.mark.parametrize(
    ("scheme", "parallel", "batch", "message"),
    [
        (None, Parallel(), {"labels": torch.zeros(1)}, "has no LAGA layers"),
        ("laga", Parallel(), {}, r"needs batch\['labels'\]"),
        ("laga", Parallel(pp=2), {"labels": torch.zeros(1)}, "a stage of pipeline_model_parallel_size=2; build"),
    ],
    ids=["layers", "labels", "stage"],
)
def test_what_cannot_be_verified_is_refused(ranks, scheme, parallel, batch, message):
    ranks(4).run_raises(refused, scheme, parallel, batch, match=message)
