"""A parallelized Transformers model must do on split sequences what the untouched model does on whole ones."""

from __future__ import annotations

import copy
import re
import runpy
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import laga_attn as laga
from laga_attn.integrations.transformers import ATTENTION_NAME, parallelize, support_table
from laga_attn.integrations.transformers_models import MODELS as SUPPORT
from laga_attn.layout import SequenceLayout
from tests.compare import assert_bitwise, assert_close
from tests.integrations.mla_models import MODELS, build, exact, packed_tokens, reference
from tests.integrations.transformers_step import (
    EXACT,
    LENGTHS,
    assert_equals,
    expected,
    parallel,
    split_batch,
    step,
)


def step_of_model(ctx, name, ulysses_degree, options):
    model, cp = build(name), parallel(ctx, ulysses_degree)
    handle = parallelize(model, cp=cp, **options)
    with exact(model), laga.traffic() as traffic:
        result = step(model, cp)
    assert handle.layers == len([module for module in model.modules() if hasattr(module, "kv_b_proj")])
    assert ctx.size == 1 or traffic.sent("latent", "forward") + traffic.sent("key_value", "forward") > 0
    return result


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_equal_the_untouched_model(ranks, name, size):
    assert_equals(ranks(size).run(step_of_model, name, None, {}), expected(name))


@pytest.mark.parametrize(
    ("size", "degree", "options"),
    [
        (2, 2, {"scheme": "laga", "save": "kv", "head_group": 1}),
        (4, 2, {"scheme": "laga", "save": "gathered", "kernel": "blockwise"}),
        (2, 1, {"scheme": "explicit"}),
        (4, 4, {"scheme": "absorbed"}),
        (2, None, {"scheme": "auto"}),
    ],
)
def test_every_option_reaches_attention(ranks, size, degree, options):
    assert_equals(ranks(size).run(step_of_model, "deepseek_v3", degree, options), expected())


def bytes_of_scheme(ctx, scheme):
    model, cp = build(), parallel(ctx)
    parallelize(model, cp=cp, scheme=scheme)
    with torch.no_grad(), laga.traffic() as traffic:
        layout, batch = split_batch(LENGTHS, cp)
        model(batch.input_ids, layout=layout)
    return {record.kind for record in traffic.records} & {"latent", "key_value"}


def test_the_scheme_decides_what_travels(ranks):
    assert ranks(2).run(bytes_of_scheme, "laga") == [{"latent"}] * 2
    assert ranks(2).run(bytes_of_scheme, "explicit") == [{"key_value"}] * 2


def step_in_fp32(ctx):
    model, cp = build(dtype=torch.float32), parallel(ctx)
    parallelize(model, cp=cp)
    return step(model, cp)


def test_fp32(ranks):
    assert_equals(ranks(2).run(step_in_fp32), reference(build(dtype=torch.float32), LENGTHS), rel=5e-6)


def without_layout(ctx, offset):
    """Two rows of 24 tokens in zigzag shards, positions starting at `offset` (None: not given)."""
    model, cp = build(), parallel(ctx)
    parallelize(model, cp=cp)
    tokens = packed_tokens((48,))[0].view(2, 24)
    layout = SequenceLayout.zigzag(24, cp.size)
    positions = None if offset is None else layout.positions(cp.rank)[None] + offset
    with exact(model), torch.no_grad():
        return model(layout.shard(tokens, cp.rank), position_ids=positions).logits


@pytest.mark.parametrize("offset", [None, 7])
def test_without_a_layout_tokens_are_zigzag_shards_and_given_positions_count(ranks, offset):
    model = build()
    tokens = packed_tokens((48,))[0].view(2, 24)
    with exact(model), torch.no_grad():
        logits = model(tokens, position_ids=torch.arange(24)[None] + (offset or 0)).logits
    for size in (1, 2, 4):
        parts = ranks(size).run(without_layout, offset)
        assert_close(SequenceLayout.zigzag(24, size).unshard(parts), logits, rel=EXACT, name=f"P={size}")


def positions_and_layout(ctx):
    """What a trainer does: everything that `shard_lm` returns, and the layout."""
    model, cp = build(), parallel(ctx)
    parallelize(model, cp=cp)
    layout, batch = split_batch(LENGTHS, cp)
    with torch.no_grad():
        both = model(batch.input_ids, position_ids=batch.position_ids, layout=layout).logits
        decoder = model.model(inputs_embeds=model.get_input_embeddings()(batch.input_ids), layout=layout)
        assert decoder.cache is None  # although config.use_cache is True
        return both, model(batch.input_ids, layout=layout).logits, model.lm_head(decoder.last_hidden_state)


def test_equal_positions_and_the_bare_decoder_give_the_same(ranks):
    for both, layout_only, decoder in ranks(2).run(positions_and_layout):
        assert_bitwise(both, layout_only)
        assert_bitwise(decoder, layout_only)


def loss_inside_the_model(ctx):
    model, cp = build(dtype=torch.float32), parallel(ctx)
    parallelize(model, cp=cp)
    layout, batch = split_batch(LENGTHS, cp)
    n_valid = sum(LENGTHS) - len(LENGTHS)
    labels = {"labels": batch.labels, "shift_labels": batch.labels, "num_items_in_batch": n_valid}
    return model(batch.input_ids, layout=layout, **labels).loss


def test_shifted_labels_and_the_global_count_give_the_loss(ranks):
    loss = reference(build(dtype=torch.float32), LENGTHS)[1]
    assert_close(sum(ranks(2).run(loss_inside_the_model)), loss, rel=1e-6)


def checkpointed(ctx, use_reentrant):
    model, cp = build().train(), parallel(ctx)
    parallelize(model, cp=cp)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with exact(model):
        return step(model, cp)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_activation_checkpointing_gives_the_same_gradients(ranks, use_reentrant):
    assert_equals(ranks(2).run(checkpointed, use_reentrant), expected())


def offloaded(ctx):
    model, cp = build(), parallel(ctx)
    parallelize(model, cp=cp)
    with exact(model), torch.autograd.graph.save_on_cpu():
        return step(model, cp)


def test_saved_tensors_hooks(ranks):
    assert_equals(ranks(2).run(offloaded), expected())


def evaluated(ctx):
    model, cp = build().eval(), parallel(ctx)
    parallelize(model, cp=cp)
    layout, batch = split_batch(LENGTHS, cp)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    with exact(model), torch.no_grad(), hooks:
        logits = model(batch.input_ids, layout=layout).logits
    assert not kept
    return logits


def test_evaluation_keeps_nothing(ranks):
    parts = ranks(2).run(evaluated)
    assert_close(SequenceLayout.packed([0, 19, 32], 2).unshard(parts), expected()[0], rel=EXACT)


def test_state_dict_and_modules_stay_and_undo_restores_everything():
    model = build()
    tokens, layout = packed_tokens((18,))
    pointers = {name: value.data_ptr() for name, value in model.state_dict().items()}
    attributes = [sorted(vars(module)) for module in model.modules()]
    before = model(tokens, use_cache=False).logits.detach()
    handle = parallelize(model, cp=laga.ContextParallel.none())
    assert handle.layers == 2
    assert model.config._attn_implementation == ATTENTION_NAME
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == pointers
    assert_close(model(tokens, layout=layout).logits.detach(), before, rel=1e-6)
    handle.undo()
    handle.undo()
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert_bitwise(model(tokens, use_cache=False).logits.detach(), before)
    parallelize(model, cp=laga.ContextParallel.none()).undo()


def test_a_copy_of_a_parallelized_model_is_parallel_too():
    model = build()
    tokens, layout = packed_tokens((18,))
    handle = parallelize(model, cp=laga.ContextParallel.none())
    twin = copy.deepcopy(model)
    handle.undo()
    assert twin.config._attn_implementation == ATTENTION_NAME
    wanted = model(tokens, use_cache=False).logits
    assert_close(twin(tokens, layout=layout).logits.detach(), wanted.detach(), rel=1e-6)


def test_no_mask_is_ever_built(monkeypatch):
    model = build()
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    parallelize(model, cp=laga.ContextParallel.none())
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype == torch.bool:
                largest = max(largest, out.numel())
            return out

    tokens, layout = packed_tokens((300, 212))
    with Watch(), torch.no_grad():
        model(tokens, layout=layout)
    assert seen == [None]
    assert largest <= 16 * 512  # nothing like 512 x 512


def test_autocast_runs_attention_in_the_autocast_dtype():
    model = build(dtype=torch.float32)
    tokens, layout = packed_tokens((18,))
    handle = parallelize(model, cp=laga.ContextParallel.none())
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens, layout=layout).logits
    handle.undo()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(tokens, use_cache=False).logits
    assert found.dtype == wanted.dtype
    assert_close(found.detach(), wanted.detach(), rel=0.05)


def test_the_table_covers_every_mla_model_of_the_installed_transformers():
    folder = Path(transformers.__file__).parent / "models"
    found = set()
    for file in folder.glob("*/modeling_*.py"):
        if "def expand_kv(" in file.read_text():
            configuration = file.with_name(file.name.replace("modeling", "configuration")).read_text()
            types = re.findall(r'^    model_type = "(\w+)"', configuration, re.MULTILINE)
            found |= {name for name in types if not re.search("vision|audio", name)}
    assert len(found) >= 15
    assert found <= {model.model_type for model in SUPPORT}
    supported = {model.model_type for model in SUPPORT if model.refusal is None}
    assert supported == {name.split()[0] for name in MODELS}  # each of them is tested above


def test_the_documentation_shows_the_table():
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    assert support_table() in page.read_text()


def example_losses(ctx):
    path = Path(__file__).parents[2] / "examples" / "hf_finetune.py"
    return runpy.run_path(str(path))["train"](parallel(ctx), 4)


def test_the_example_learns_alike_on_any_number_of_ranks(ranks):
    one, two = ranks(1).run(example_losses), ranks(2).run(example_losses)
    assert two[0] == two[1]
    assert two[0] == pytest.approx(one[0], rel=1e-3)
    assert one[0][-1] < 0.9 * one[0][0]
