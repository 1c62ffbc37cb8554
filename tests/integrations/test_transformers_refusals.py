"""What a parallelized Transformers model refuses, and on which ranks."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import laga_attn as laga
from laga_attn.integrations.transformers import parallelize
from laga_attn.layout import SequenceLayout
from tests.integrations.mla_models import build, packed_tokens
from tests.integrations.transformers_step import (
    parallel,
)


def test_quantized_or_biased_projections_are_refused():
    model = build()
    model.model.layers[1].self_attn.kv_b_proj = nn.Linear(16, 56)
    with pytest.raises(ValueError, match="without bias"):
        parallelize(model, cp=laga.ContextParallel.none())


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
