"""A GPT model with LAGA gives the logits, loss and gradients of the stock model on one rank, however it is split."""

from __future__ import annotations

import pytest

from laga_attn.auto import legal_degrees
from laga_attn.integrations.megatron import with_laga
from tests.compare import assert_close
from tests.integrations.megatron.models import HEADS, Batch, Model, Step, config_of, step_of
from tests.integrations.megatron.te_stand_ins import te_stand_ins
from tests.integrations.megatron.world import Parallel, megatron_ranks

EXACT = 1e-5  # fp32
SEQUENCES = Batch(rows=2, lengths=(32,))
DOCUMENTS = Batch(lengths=(5, 9, 14), packed=True)  # in slots of 8, 16 and 16
TP_CP = Parallel(tp=2, cp=2)
TP_CP_SP = Parallel(tp=2, cp=2, sequence_parallel=True)
LAYOUTS = [Parallel(cp=2), Parallel(cp=4), TP_CP, TP_CP_SP]


def step(ctx, model: Model, batch: Batch, parallel: Parallel) -> Step | None:
    with megatron_ranks(parallel), te_stand_ins():
        result = step_of(model, batch, parallel)
    return result if ctx.rank == 0 else None


@pytest.fixture(scope="module")
def stock(ranks):
    """Results of the stock layer without any parallelism, each computed once."""
    known: dict[tuple[str, Batch], Step] = {}

    def result(model: Model, batch: Batch) -> Step:
        model = model.with_(scheme=None, ulysses_degree="auto", save="auto")
        if (repr(model), batch) not in known:
            known[repr(model), batch] = ranks(4).run(step, model, batch, Parallel())[0]
        return known[repr(model), batch]

    return result


def assert_same(actual: Step, expected: Step, name: str) -> None:
    assert_close(actual.logits, expected.logits, rel=EXACT, name=f"{name} logits")
    assert_close(actual.loss, expected.loss, rel=EXACT, name=f"{name} loss")
    assert actual.grads.keys() == expected.grads.keys()
    for parameter, grad in expected.grads.items():
        assert_close(actual.grads[parameter], grad, rel=EXACT, name=f"{name} {parameter}")


@pytest.mark.parametrize("batch", [SEQUENCES, DOCUMENTS], ids=["sbhd", "thd"])
@pytest.mark.parametrize("rope_type", ["rope", "yarn"])
@pytest.mark.parametrize("parallel", [Parallel(), *LAYOUTS], ids=str)
def test_logits_loss_and_all_gradients_equal_the_stock_model(ranks, stock, parallel, rope_type, batch):
    # Megatron trains MoE under tensor parallelism with sequence parallelism only.
    experts = None if parallel == TP_CP else 4
    model = Model(rope_type=rope_type, experts=experts)
    assert_same(ranks(4).run(step, model, batch, parallel)[0], stock(model, batch), f"{parallel}")


@pytest.mark.parametrize("scheme", ["laga", "explicit", "absorbed", "auto"])
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_every_scheme_and_every_legal_degree(ranks, stock, parallel, scheme):
    degrees = [*legal_degrees(parallel.cp, HEADS // parallel.tp), "auto"]
    assert len(degrees) >= 3
    experts = None if parallel == TP_CP else 4
    for batch in (SEQUENCES, DOCUMENTS):
        for degree in degrees:
            model = Model(scheme=scheme, ulysses_degree=degree, rope_type="yarn", experts=experts)
            name = f"{scheme} U={degree} packed={batch.packed}"
            assert_same(ranks(4).run(step, model, batch, parallel)[0], stock(model, batch), name)


def mixed_step(ctx, model: Model, parallel: Parallel) -> Step:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    with megatron_ranks(parallel):
        block = get_gpt_decoder_block_spec(config_of(model, parallel), use_transformer_engine=False)
        schemes = ("laga", "absorbed", "explicit", "auto")
        block.layer_specs = [with_laga(s, scheme=scheme) for s, scheme in zip(block.layer_specs, schemes, strict=True)]
        return step_of(model, DOCUMENTS, parallel, block)


@pytest.mark.parametrize("parallel", [Parallel(cp=4), TP_CP_SP], ids=str)
def test_layers_of_a_block_with_a_scheme_each(ranks, stock, parallel):
    model = Model(layers=4, experts=4)
    assert_same(ranks(4).run(mixed_step, model, parallel)[0], stock(model, DOCUMENTS), f"{parallel}")


@pytest.mark.parametrize("save", ["latent", "gathered", "kv"])
def test_save_policies_and_a_model_without_query_latent(ranks, stock, save):
    model = Model(q_lora_rank=None, save=save)
    assert_same(ranks(4).run(step, model, SEQUENCES, TP_CP_SP)[0], stock(model, SEQUENCES), save)


@pytest.mark.parametrize(
    "options",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]},
    ],
    ids=["full", "core_attn", "mla_up_proj", "core_attn+mla_up_proj"],
)
@pytest.mark.parametrize("degree", [1, 2])
def test_recomputation_changes_nothing(ranks, stock, options, degree):
    model, batch = Model(ulysses_degree=degree), DOCUMENTS
    recomputing = model.with_(options=options)
    for parallel in (Parallel(cp=2), TP_CP_SP):
        assert_same(ranks(4).run(step, recomputing, batch, parallel)[0], stock(model, batch), f"{parallel}")


def test_sliding_windows(ranks, stock):
    model = Model(options={"window_size": (6, 0)})
    assert_same(ranks(4).run(step, model, SEQUENCES, Parallel(cp=2))[0], stock(model, SEQUENCES), "window")


@pytest.mark.parametrize("batch", [SEQUENCES, DOCUMENTS], ids=["sbhd", "thd"])
@pytest.mark.parametrize("parallel", [Parallel(), Parallel(cp=2), TP_CP, TP_CP_SP], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"layernorm_zero_centered_gamma": True}, {"normalization": "LayerNorm"}],
    ids=["rms", "zero-centred", "layernorm"],
)
def test_projections_as_in_transformer_engines_spec(ranks, stock, parallel, batch, options):
    """The down-projection is whole on every rank, and the norm is fused into the up-projection."""
    model = Model(te_layers=True, options=options)
    assert_same(ranks(4).run(step, model, batch, parallel)[0], stock(model, batch), f"{parallel}")
