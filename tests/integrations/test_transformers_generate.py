"""A parallelized model with a latent cache gives the logits and the tokens of the untouched model."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers.cache_utils import DynamicCache

import laga_attn as laga
from laga_attn.attention_plan import LatentDims
from laga_attn.inference import crossover
from laga_attn.inference.storage import FP8
from laga_attn.integrations.transformers import generation_cache, parallelize
from tests.compare import assert_close
from tests.integrations.generation import Call, call_in_chunks, generate, parallel, tiny_model
from tests.integrations.mla_models import MODELS

SIZES = (1, 2, 3, 4)
EXACT = 2e-6  # weights are fp64, but the models' norms, rotations and routers work in fp32


def prompts(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: tuple[int, ...], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, mask = prompts(len(lengths), length), torch.ones(len(lengths), length, dtype=torch.int64)
    for row, real in enumerate(lengths):
        tokens[row, : length - real], mask[row, : length - real] = 0, 0
    return tokens, mask


def stock_logits(call: Call, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        return tiny_model(call.model, call.dtype)(tokens, attention_mask=mask, position_ids=positions).logits


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 90])
def test_logits_in_chunks_equal_one_forward_pass_under_yarn(ranks, size, chunk):
    tokens = prompts(1, 90 if chunk > 7 else 20)
    length = tokens.shape[1]
    chunks = tuple(min(chunk, length - start) for start in range(0, length, chunk))
    for kind in ("zigzag", "contiguous"):
        call = Call(chunks=chunks, cache={"kind": kind, "rebuild_from": 6})
        for logits in ranks(size).run(call_in_chunks, call, tokens, None):
            assert_close(logits, stock_logits(call, tokens), rel=EXACT, name=f"{kind} P={size}")


@pytest.mark.parametrize(("size", "model"), [(1, name) for name in MODELS] + [(3, "deepseek_v3"), (2, "minicpm3")])
def test_batches_of_different_lengths(ranks, size, model):
    """In the second chunk one row is prefilled further while the others get their first tokens or a few."""
    tokens, mask = left_padded((40, 12, 15, 33), 40)
    call = Call(model=model, chunks=(25, 14, 1), cache={"rebuild_from": 10})
    expected = stock_logits(call, tokens, mask)
    for logits in ranks(size).run(call_in_chunks, call, tokens, mask):
        assert_close(logits[mask.bool()], expected[mask.bool()], rel=EXACT)
        assert not logits.isnan().any()


GENERATIONS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beam": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 8},
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("way", GENERATIONS)
def test_generate_gives_the_tokens_of_the_untouched_model(ranks, size, way):
    tokens = prompts(1 if way == "prompt lookup" else 2, 19)
    if way == "prompt lookup":
        tokens[0, 5:] = tokens[0, :14].clone()  # something to look up
    arguments = {"max_new_tokens": 12, **GENERATIONS[way]}
    call = Call(arguments=arguments, cache={"rebuild_from": 8})
    model = tiny_model()
    torch.manual_seed(11)
    expected = model.generate(tokens, **arguments)
    for out, _ in ranks(size).run(generate, call, tokens, None):
        assert torch.equal(out, expected), f"{out} != {expected}"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("way", ["greedy", "beam"])
def test_generate_with_left_padding(ranks, size, way):
    tokens, mask = left_padded((16, 5, 1), 16)
    arguments = {"max_new_tokens": 8, **GENERATIONS[way]}
    expected = tiny_model().generate(tokens, attention_mask=mask, **arguments)
    for out, lengths in ranks(size).run(generate, Call(arguments=arguments), tokens, mask):
        assert torch.equal(out, expected)
        if way == "greedy":
            assert lengths == [16 + 7, 5 + 7, 1 + 7]  # pads are not stored, and the last token was not fed back


def test_generation_goes_on_from_a_cache(ranks):
    tokens = prompts(2, 10)
    model = tiny_model()
    expected = model.generate(tokens, max_new_tokens=12)
    parallelize(model, cp=laga.ContextParallel.none())
    cache = generation_cache(model)
    half = model.generate(tokens, max_new_tokens=6, past_key_values=cache)
    assert torch.equal(model.generate(half, max_new_tokens=6, past_key_values=cache), expected)


def export_prompt(ctx, tokens, mask, folder):
    from laga_attn.inference import export_cache

    model = tiny_model()
    cp = parallel(ctx)
    parallelize(model, cp=cp)
    cache = generation_cache(model, cp=cp, page_size=4)
    with torch.no_grad():
        model(tokens, attention_mask=mask, cache=cache)
    export_cache(cache.latents, folder)


def generate_from_file(ctx, tokens, mask, folder):
    from laga_attn.inference import import_cache

    model = tiny_model()
    cp = parallel(ctx)
    parallelize(model, cp=cp)
    cache = generation_cache(model, cp=cp, page_size=4)
    cache.adopt(import_cache(cache.latents, folder))
    return model.generate(tokens, attention_mask=mask, cache=cache, max_new_tokens=7)


@pytest.mark.parametrize(("source", "target"), [(1, 1), (2, 3)])
def test_a_prompt_is_computed_once_and_read_from_a_file(ranks, tmp_path, source, target):
    tokens, mask = left_padded((14, 6), 14)
    expected = tiny_model().generate(tokens, attention_mask=mask, max_new_tokens=7)
    ranks(source).run(export_prompt, tokens[:, :12], mask[:, :12], tmp_path / "prompt")
    for out in ranks(target).run(generate_from_file, tokens, mask, tmp_path / "prompt"):
        assert torch.equal(out, expected)


def test_latents_of_another_model_are_refused(ranks, tmp_path):
    from laga_attn.inference import import_cache

    ranks(1).run(export_prompt, prompts(1, 9), None, tmp_path / "prompt")
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_a_proj.weight[0, 0] += 1  # the same sizes, a fine-tuned model
    cache = generation_cache(model, page_size=4)
    with pytest.raises(ValueError, match="latents fit the model that computed them"):
        import_cache(cache.latents, tmp_path / "prompt")
    assert cache.latents.sequences == ()


def test_lora_on_every_projection_is_part_of_the_absorbed_weights():
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(), config).double().eval()
    tokens = prompts(1, 12)
    expected = model(tokens).logits
    parallelize(model, cp=laga.ContextParallel.none())

    def logits() -> torch.Tensor:
        cache = generation_cache(model)
        with torch.no_grad():
            return torch.cat([model(part, cache=cache).logits for part in (tokens[:, :9], tokens[:, 9:])], 1)

    assert_close(logits(), expected.detach(), rel=EXACT)
    cache = generation_cache(model)
    with torch.no_grad():
        model(tokens[:, :9], cache=cache)
        for name, parameter in model.named_parameters():
            if "layers.1" in name and "kv_b_proj.lora" in name:  # seen in the middle of a text
                parameter.mul_(2)
        changed = model(tokens[:, 9:10], cache=cache).logits
        assert_close(changed, model(tokens[:, :10], cache=generation_cache(model)).logits[:, 9:], rel=EXACT)
        assert (changed - expected[:, 9:10]).abs().max() > 1e-3
    with torch.no_grad(), model.disable_adapter():
        assert_close(logits(), tiny_model()(tokens).logits, rel=EXACT)


def caches_after(model, tokens, **options):
    """Bytes per token that a stock cache, the K and V of all heads and a latent cache take."""
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, cache=stock)
        layers = [layer for layer in stock.layers if layer.is_initialized]
        expand = next(module.expand_kv for module in model.modules() if hasattr(module, "expand_kv"))
        expanded = [tensor for layer in layers for tensor in expand(layer.keys, layer.values)]
        parallelize(model, cp=laga.ContextParallel.none())
        own = generation_cache(model, **options)
        model(tokens, cache=own)
    stored = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    sizes = (sum(t.nbytes for t in tensors) for tensors in (stored, expanded))
    return (*(size / tokens.shape[1] for size in sizes), own.latents.memory().total / tokens.shape[1])


@pytest.mark.parametrize("name", MODELS)
def test_transformers_stores_latents_as_well(name):
    """Since 5.24, for every supported model: a latent cache in the model's dtype takes the same bytes."""
    stock, _, own = caches_after(tiny_model(name, torch.float32), prompts(1, 64))
    assert own == stock == 2 * (16 + 4) * 4


@pytest.mark.parametrize(("dtype", "row"), [(torch.bfloat16, 1152), (FP8, 584)] if FP8 else [(torch.bfloat16, 1152)])
def test_latents_are_a_71st_of_k_and_v_of_all_heads_of_deepseek_v3(dtype, row):
    sizes = {"num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
    sizes |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "num_hidden_layers": 1}
    stock, expanded, own = caches_after(tiny_model(dtype=torch.bfloat16, **sizes), prompts(1, 64), dtype=dtype)
    assert (stock, expanded, own) == (1152, 128 * (192 + 128) * 2, row)
    assert round(expanded / stock, 1) == 71.1


def test_undo_gives_the_stock_cache_back():
    model = tiny_model()
    tokens = prompts(1, 9)
    expected = model.generate(tokens, max_new_tokens=5)
    parallelize(model, cp=laga.ContextParallel.none()).undo()
    assert torch.equal(model.generate(tokens, max_new_tokens=5), expected)


def test_only_the_wanted_hidden_states_are_sent(ranks):
    call = Call(chunks=(64,), cache={"rebuild_from": 6})
    tokens = prompts(2, 64)
    for all_logits, one in ranks(2).run(hidden_traffic, call, tokens):
        assert one <= 2 * 32 * 8  # at most the last token of either row
        assert all_logits == 64 * 32 * 8  # half of the tokens of both rows


def hidden_traffic(ctx, call, tokens):
    sent = []
    for keep in (0, 1):
        model = tiny_model()
        cp = parallel(ctx)
        parallelize(model, cp=cp)
        cache = generation_cache(model, cp=cp, **call.cache)
        with torch.no_grad(), laga.traffic() as ledger:
            logits = model(tokens, cache=cache, logits_to_keep=keep).logits
        assert logits.shape[1] == (keep or tokens.shape[1])
        sent.append(ledger.sent("hidden"))
    return tuple(sent)


def wrong_call(ctx, which):
    model = tiny_model()
    cp = parallel(ctx)
    parallelize(model, cp=cp)
    cache = generation_cache(model, cp=cp, max_tokens=64 if which == "full" else None)
    tokens = prompts(2, 9)
    with torch.no_grad():
        model(tokens, cache=cache)
    before = cache.latents.book
    arguments = {"cache": cache}
    if which == "tokens differ":
        tokens = tokens + ctx.rank
    elif which == "stock cache":
        arguments = {"use_cache": True}
    elif which == "batch":
        tokens = tokens[:1]
    elif which == "positions":
        arguments["position_ids"] = torch.arange(9)[None]
    elif which == "hidden later":
        arguments["attention_mask"] = torch.cat([torch.zeros(2, 9), torch.ones(2, 9)], 1)
    elif which == "full":
        tokens = prompts(2, 500)
    elif which == "hidden states":
        arguments["output_hidden_states"] = True
    elif which == "labels" and ctx.rank:
        arguments["labels"] = tokens
    try:
        with torch.no_grad():
            model(tokens, **arguments)
    finally:
        assert cache.latents.book is before


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("tokens differ", "ranks disagree: tokens"),
        ("stock cache", "generation_cache"),
        ("batch", "batch of 2 sequences, but the model got 1"),
        ("positions", "position_ids"),
        ("hidden later", "cannot be hidden afterwards"),
        ("full", "the cache is full"),
        ("hidden states", "output_hidden_states"),
        ("labels", "rank 1: labels cannot be used"),
    ],
)
def test_wrong_calls_are_refused_on_all_ranks_and_change_nothing(ranks, which, message):
    ranks(2).run_raises(wrong_call, which, match=message)


def split_tokens(ctx, lengths):
    """How many tokens of a prompt are split, by the length of the prompt."""
    model = tiny_model()
    cp = parallel(ctx)
    parallelize(model, cp=cp)
    found = []
    for length in lengths:
        cache = generation_cache(model, cp=cp)
        with torch.no_grad(), laga.traffic() as ledger:
            model(prompts(1, length), cache=cache)
        found.append(ledger.sent("latent") > 0)
    return found


def test_prompts_are_split_from_the_crossover_on(ranks):
    dims = LatentDims(4, 8, 4, 6, 16)
    assert crossover(dims) == 12  # 16 * 14 / (20 + 16 - 18)
    assert generation_cache(tiny_model()).rebuild_from == 12
    for found in ranks(2).run(split_tokens, (5, 11, 12, 30)):
        assert found == [False, False, True, True]


def first_call_differs(ctx):
    model = tiny_model()
    cp = parallel(ctx)
    parallelize(model, cp=cp)
    cache = generation_cache(model, cp=cp)
    tokens = prompts(2, 9)
    with torch.no_grad():
        with pytest.raises(ValueError, match="ranks disagree"):
            model(tokens[: 2 - ctx.rank], cache=cache)
        assert cache.latents.sequences == ()
        return model(tokens, cache=cache).logits


def test_a_cache_is_as_good_as_new_after_a_first_call_that_ranks_made_differently(ranks):
    for logits in ranks(2).run(first_call_differs):
        assert_close(logits, stock_logits(Call(), prompts(2, 9)), rel=EXACT)


def test_logits_can_be_asked_for_by_index_or_from_the_end_and_the_next_call_gives_all():
    model = tiny_model()
    tokens = prompts(2, 12)
    expected = stock_logits(Call(), tokens)
    parallelize(model, cp=laga.ContextParallel.none())
    cache = generation_cache(model)
    with torch.no_grad():
        last = model(tokens[:, :5], cache=cache, logits_to_keep=2).logits
        some = model(tokens[:, 5:9], cache=cache, logits_to_keep=torch.tensor([0, 2])).logits
        model(tokens[:, 9:10], cache=cache, logits_to_keep=1)
        hidden = model.model(tokens[:, 10:], cache=cache).last_hidden_state  # the decoder alone
    assert_close(last, expected[:, 3:5], rel=EXACT)
    assert_close(some, expected[:, [5, 7]], rel=EXACT)
    assert_close(model.lm_head(hidden).detach(), expected[:, 10:], rel=EXACT)


def test_a_rollback_is_as_if_the_tokens_had_never_been():
    model = tiny_model()
    tokens = prompts(2, 12)
    expected = stock_logits(Call(), tokens)
    parallelize(model, cp=laga.ContextParallel.none())
    cache = generation_cache(model)
    with torch.no_grad():
        model(torch.cat([tokens[:, :5], prompts(2, 4, seed=9)], 1), cache=cache)
        cache.crop(-4)
        assert cache.get_seq_length() == 5
        assert cache.get_mask_sizes(3, 0) == (8, 0)
        assert_close(model(tokens[:, 5:], cache=cache).logits, expected[:, 5:], rel=EXACT)


def test_rows_that_share_a_sequence_and_too_long_a_rollback_are_refused():
    model = tiny_model()
    parallelize(model, cp=laga.ContextParallel.none())
    cache = generation_cache(model)
    with torch.no_grad():
        model(prompts(2, 6), cache=cache)
    first, second = cache.sequences
    with pytest.raises(ValueError, match="make forks"):
        cache.adopt([first, first])
    with pytest.raises(ValueError, match="shortest"):
        cache.crop(-7)
    assert cache.sequences == [first, second]
    assert [cache.latents.length(s) for s in cache.sequences] == [6, 6]


def test_a_model_that_was_not_parallelized_says_so():
    model = tiny_model()
    with pytest.raises(ValueError, match="parallelize"):
        model(prompts(1, 4), cache=generation_cache(model))
