"""A parallelized Transformers model must do on split sequences what the untouched model does on whole ones."""

from __future__ import annotations

import copy
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import laga_attn as laga
from laga_attn.gradients import reduce_gradients, token_mean_loss
from laga_attn.integrations.transformers import ATTENTION_NAME, parallelize, support_table
from laga_attn.integrations.transformers_models import MODELS as SUPPORT
from laga_attn.layout import SequenceLayout
from tests.compare import assert_bitwise, assert_close
from tests.integrations.mla_models import MODELS, build, exact, packed_tokens, reference

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


def test_quantized_or_biased_projections_are_refused():
    model = build()
    model.model.layers[1].self_attn.kv_b_proj = nn.Linear(16, 56)
    with pytest.raises(ValueError, match="without bias"):
        parallelize(model, cp=laga.ContextParallel.none())


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


PACKED = SequenceLayout.packed([0, 10, 16], 1)
WRONG_CALLS = {
    "padding mask": ({"attention_mask": torch.ones(1, 16)}, "attention_mask"),
    "cache": ({"use_cache": True}, "KV caches"),
    "old cache": ({"past_key_values": transformers.DynamicCache()}, "KV caches"),
    "unshifted labels": ({"labels": torch.ones(1, 16, dtype=torch.long)}, "labels cannot be used"),
    "labels without count": (
        {name: torch.ones(1, 16, dtype=torch.long) for name in ("labels", "shift_labels")},
        "num_items_in_batch",
    ),
    "last logits": ({"logits_to_keep": 1}, "logits_to_keep counts from the end"),
    "some logits": ({"logits_to_keep": torch.tensor([0, 3])}, "logits_to_keep counts from the end"),
    "HF packing": ({"cu_seq_lens_q": torch.tensor([0, 10, 16])}, "SequenceLayout.packed"),
    "attention weights": ({"output_attentions": True}, "output_attentions"),
    "bidirectional": ({"is_causal": False}, "is_causal"),
    "layout of other ranks": ({"layout": SequenceLayout.zigzag(32, 2)}, "2 ranks"),
    "layout of another length": ({"layout": SequenceLayout.zigzag(20, 1)}, "20 tokens.*got 16"),
    "positions against the layout": (
        {"layout": PACKED, "position_ids": torch.arange(16)[None]},
        "differ from layout.positions",
    ),
    "positions of documents without a layout": ({"position_ids": PACKED.positions(0)[None]}, "without a layout"),
    "positions of another shape": ({"position_ids": torch.arange(15)[None]}, "position_ids must have shape"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_calls_that_would_be_wrong_are_refused(case):
    arguments, message = WRONG_CALLS[case]
    model = build()
    parallelize(model, cp=laga.ContextParallel.none())
    with pytest.raises(ValueError, match=message):
        model(packed_tokens((16,))[0], **arguments)


def test_dropout_is_refused_in_training_only():
    model = build(attention_dropout=0.1)
    tokens, layout = packed_tokens((16,))
    parallelize(model, cp=laga.ContextParallel.none())
    assert model.eval()(tokens, layout=layout).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        model.train()(tokens, layout=layout)


def test_models_out_of_step_with_the_handle_are_refused():
    model = build()
    tokens, layout = packed_tokens((16,))
    parallelize(model, cp=laga.ContextParallel.none())
    with pytest.raises(ValueError, match="already"):
        parallelize(model, cp=laga.ContextParallel.none())
    other = type(model)(model.config)
    with pytest.raises(ValueError, match="not through a parallelized model"):
        other.double()(tokens, use_cache=False)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="changed to 'eager'"):
        model(tokens, layout=layout)


def one_rank_is_wrong(ctx, fault):
    model, cp = build(), parallel(ctx)
    parallelize(model, cp=cp)
    layout = SequenceLayout.zigzag(16, 2)
    ids = layout.shard(packed_tokens((16,))[0], cp.rank)
    wrong = cp.rank == 1
    if fault == "length" and wrong:
        ids = ids[:, :-2]
    arguments = {
        "mask": {"attention_mask": torch.ones(1, 8)},
        "labels": {"labels": ids},
        "logits": {"logits_to_keep": 1},
    }
    model(ids, layout=layout, **arguments.get(fault, {}) if wrong else {})


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("length", "got 6"),
        ("mask", "rank 1: attention_mask"),
        ("labels", "rank 1: labels cannot be used"),
        ("logits", "rank 1: logits_to_keep counts"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(ranks, fault, text):
    ranks(2).run_raises(one_rank_is_wrong, fault, match=text)


def odd_shards(ctx):
    model = build()
    parallelize(model, cp=parallel(ctx))
    model(packed_tokens((7,))[0])


def test_odd_shards_without_a_layout_are_refused(ranks):
    ranks(2).run_raises(odd_shards, match="of even length.*has 7")


class Remote(nn.Module):
    """A decoder as checkpoints with their own code bring it: latent attention, but no `expand_kv`."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.kv_b_proj = nn.Linear(4, 4, bias=False)


def test_models_that_cannot_run_are_refused_with_the_reason():
    none = laga.ContextParallel.none()
    with pytest.raises(ValueError, match="no model of Hugging Face"):
        parallelize(nn.Linear(2, 2), cp=none)
    with pytest.raises(ValueError, match=r"5\.24 or newer|Transformers 5\.24"):
        parallelize(Remote(), cp=none)
    llama = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    with pytest.raises(ValueError, match="no MLA attention"):
        parallelize(transformers.LlamaForCausalLM(llama), cp=none)
    model = build()
    model.config.model_type = "novel_mla"
    with pytest.raises(ValueError, match="supported model types: deepseek_v2, deepseek_v3"):
        parallelize(model, cp=none)
    model.config.model_type = "deepseek_v32"
    with pytest.raises(ValueError, match="indexer"):
        parallelize(model, cp=none)
    classifier = transformers.DeepseekV3ForSequenceClassification(build().config)
    with pytest.raises(ValueError, match="reads the last token"):
        parallelize(classifier, cp=none)


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
