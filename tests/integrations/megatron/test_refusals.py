"""What cannot work is refused with its reason: at construction where it is known then, otherwise at the call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from laga_attn.integrations.megatron import features, rotary, support_table
from laga_attn.integrations.megatron.masks import is_causal, window_of
from laga_attn.integrations.megatron.packing import check_packed, layout_of
from laga_attn.integrations.megatron.refusals import REFUSALS, SUPPORTED, check_config
from laga_attn.layout import SequenceLayout
from tests.integrations.megatron.models import Model, build, spec_of
from tests.integrations.megatron.world import Parallel, megatron_ranks


def construct(ctx, model: Model, parallel: Parallel) -> list[int | None]:
    """Ulysses degrees of the two layers of a model."""
    with megatron_ranks(parallel):
        layers = build(model, parallel).decoder.layers
        return [layer.self_attention.core_attention.cp.ulysses_degree for layer in layers]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("attention_dropout", 0.1),
        ("softmax_type", "off-by-one"),
        ("cache_mla_latents", True),
    ],
)
def test_options_that_cannot_work_are_refused_at_construction(ranks, option, value):
    message = f"{option}={value!r} does not work with latent attention: .*; "
    ranks(4).run_raises(construct, Model(options={option: value}), Parallel(), match=message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp8": "hybrid"}, "fp8='hybrid' .*bf16"),
        ({"fp4": "e2m1"}, "fp4='e2m1' .*bf16"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant='dsa' .*leave those layers"),
        ({"gtp_weight_remat_size": 2}, "gtp_weight_remat_size=2 .*leave tensor_parallel_num_weight_shards"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
            r"offload_modules=\['core_attn'\] .*leave 'core_attn' out",
        ),
    ],
)
def test_options_that_need_other_hardware_to_be_set_are_refused_too(options, message):
    with pytest.raises(ValueError, match=message):
        check_config(SimpleNamespace(**options))


def test_a_plain_configuration_is_not_refused():
    check_config(SimpleNamespace())
    check_config(
        SimpleNamespace(
            fp8=None, attention_dropout=0.0, offload_modules=["core_attn"], softmax_type="vanilla",
            gtp_weight_remat_size=1,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cp_comm_type", "degree", "expected"),
    [
        (None, "auto", [None, None]),
        ("p2p", 2, [2, 2]),
        ("all_gather", "auto", [1, 1]),
        ("a2a", "auto", [4, 4]),
        ("a2a", 4, [4, 4]),
    ],
)
def test_cp_comm_type_is_replaced_by_a_ulysses_degree(ranks, cp_comm_type, degree, expected):
    model = Model(ulysses_degree=degree, options={"cp_comm_type": cp_comm_type})
    assert ranks(4).run(construct, model, Parallel(cp=4)) == [expected] * 4


@pytest.mark.parametrize(
    ("cp_comm_type", "degree", "message"),
    [
        ("a2a", 1, "cp_comm_type='a2a' means ulysses_degree=4 on 4 ranks, but with_laga was given ulysses_degree=1"),
        ("all_gather", 4, "cp_comm_type='all_gather' means ulysses_degree=1"),
        ("a2a+p2p", "auto", r"cp_comm_type='a2a\+p2p' has no counterpart"),
        (None, 3, "ulysses_degree=3 does not divide the 4 context-parallel ranks"),
    ],
)
def test_a_cp_comm_type_that_contradicts_is_refused(ranks, cp_comm_type, degree, message):
    # Megatron checks that hierarchical groups exist before it builds layers, so the type is set behind its back.
    model = Model(ulysses_degree=degree)
    ranks(4).run_raises(construct_with_comm_type, model, cp_comm_type, match=message)


def construct_with_comm_type(ctx, model: Model, cp_comm_type: str | None) -> None:
    from laga_attn.integrations.megatron.options import context_parallel

    with megatron_ranks(Parallel(cp=4)):
        from megatron.core import parallel_state

        context_parallel(parallel_state.get_context_parallel_group(), model.ulysses_degree, cp_comm_type)


def call(ctx, model: Model, arguments: dict[str, Any], change: str | None = None) -> None:
    """Call the attention of a layer that was built in order, after changing something about it."""
    with megatron_ranks(Parallel()), mock.patch.object(rotary, "FUSED_ROTARY", None):
        attention = build(model, Parallel()).decoder.layers[0].self_attention
        if change == "wrapped up-projection":
            attention.linear_kv_up_proj = torch.nn.Sequential(attention.linear_kv_up_proj)
        if change == "stock class":
            attention.__class__ = type(attention).__mro__[2]
            del vars(attention.linear_kv_up_proj)["forward"]
        attention(torch.randn(8, 1, 32), None, **arguments)


@pytest.mark.parametrize(
    ("arguments", "change", "message"),
    [
        ({"key_value_states": torch.zeros(1)}, None, "without key_value_states"),
        ({}, "wrapped up-projection", "linear_kv_up_proj was replaced by Sequential .*merge the adapter"),
        ({}, "stock class", "got the keys and values of a stock layer.*turn that off"),
    ],
)
def test_calls_that_cannot_work_are_refused(ranks, arguments, change, message):
    ranks(4).run_raises(call, Model(), arguments, change, match=message)


def infer(ctx) -> None:
    with megatron_ranks(Parallel()):
        attention = build(Model(), Parallel()).decoder.layers[0].self_attention
        attention.get_query_key_value_tensors(torch.randn(8, 1, 32), inference_context=object())


def test_inference_with_a_cache_is_refused(ranks):
    ranks(4).run_raises(infer, match="without a KV cache.*use the stock layer for inference")


def test_a_layer_needs_the_core_attention_of_with_laga(ranks):
    ranks(4).run_raises(build_with_stock_core, match="needs a LatentCoreAttention, got PlainAttention")


def build_with_stock_core(ctx) -> None:
    from laga_attn.integrations.megatron.layer import LatentMLASelfAttention

    with megatron_ranks(Parallel()):
        spec = spec_of(Model(scheme=None))
        spec.submodules.self_attention.module = LatentMLASelfAttention
        build(Model(), Parallel(), spec)


@pytest.mark.parametrize(
    ("mask_type", "mask", "expected"),
    [
        (AttnMaskType.causal, None, True),
        (AttnMaskType.causal, torch.ones(1), True),
        (AttnMaskType.padding_causal, None, True),
        (AttnMaskType.no_mask, None, False),
        (AttnMaskType.padding, None, False),
    ],
)
def test_mask_types(mask_type, mask, expected):
    assert is_causal(mask_type, mask) is expected


@pytest.mark.parametrize("mask_type", [AttnMaskType.padding, AttnMaskType.padding_causal, AttnMaskType.arbitrary])
def test_masks_that_would_have_to_be_read_are_refused(mask_type):
    with pytest.raises(ValueError, match=rf"attn_mask_type={mask_type.name} with a mask tensor.*packed_seq_params"):
        is_causal(mask_type, torch.ones(1))


def test_windows_of_layers():
    def window(size, skip=None, layer=2):
        return window_of(SimpleNamespace(window_size=size, window_attn_skip_freq=skip), layer)

    assert window(None) is None
    assert window((7, 0)) == 8
    assert window((-1, 0)) is None
    assert [window((7, 0), 2, layer) for layer in (1, 2, 3)] == [8, None, 8]
    with pytest.raises(ValueError, match=r"window_size=\(7, 2\) reaches 2 tokens ahead"):
        window((7, 2))


def packed(**fields: Any) -> PackedSeqParams:
    return PackedSeqParams(**{"qkv_format": "thd", **fields})


def test_packed_documents_become_a_layout_that_is_read_once():
    real, padded = torch.tensor([0, 5, 14]), torch.tensor([0, 8, 24])
    params = packed(cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
    layout = layout_of(params, 12, 2)
    assert layout == SequenceLayout.packed([0, 5, 14], 2, cu_seqlens_padded=[0, 8, 24])
    assert layout_of(params, 12, 2) is layout
    real[1] = 6  # a buffer that is filled anew
    assert layout_of(params, 12, 2).lengths == (6, 8)
    assert layout_of(packed(cu_seqlens_q=torch.tensor([0, 8, 16])), 8, 2).padded_lengths == (8, 8)
    assert layout_of(None, 12, 2) == SequenceLayout.zigzag(24, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qkv_format": "sbhd"}, "qkv_format is 'sbhd'; packed sequences must be 'thd'"),
        ({"local_cp_size": 2}, "local_cp_size=2.*hybrid context parallelism"),
    ],
)
def test_other_forms_of_packing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        check_packed(packed(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"cu_seqlens_q": torch.tensor([0, 8]), "cu_seqlens_kv": torch.tensor([0, 4])},
            r"cu_seqlens_q=\[0, 8\] and cu_seqlens_kv=\[0, 4\]: .* must be equal",
        ),
        ({"cu_seqlens_q": torch.tensor([0, 6, 8])}, "document 0 has padded length 6, which is not a multiple of 4"),
        ({}, "no cu_seqlens_q"),
    ],
)
def test_documents_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        layout_of(packed(**fields), 4, 2)


def test_the_support_table_holds_every_refusal_and_every_feature():
    table = support_table().splitlines()
    assert len(table) == 2 + len(SUPPORTED) + len(REFUSALS)
    for refusal in REFUSALS:
        assert any(line.startswith(f"| `{refusal.option}` | no |") and refusal.instead in line for line in table)


def test_the_guide_holds_the_support_table():
    guide = Path(__file__).resolve().parents[3] / "docs" / "megatron.md"
    assert support_table() in guide.read_text(encoding="utf-8")


def test_a_release_that_is_too_old_is_refused():
    with (
        mock.patch.object(features.mla, "MLASelfAttention", torch.nn.Linear),
        pytest.raises(ImportError, match=r"neither pg_collection nor model_comm_pgs.*use megatron-core 0\.14 or newer"),
    ):
        features._groups_attribute()


def test_without_the_fused_rotary_kernel_the_option_is_refused(ranks):
    model = Model(rope_type="yarn", options={"apply_rope_fusion": True})
    ranks(4).run_raises(call, model, {}, match="apply_rope_fusion needs Megatron's fused MLA RoPE kernel.*=False")


def test_without_megatron_the_error_says_how_to_install_it():
    code = "import sys; sys.modules['megatron'] = None; import laga_attn; laga_attn.megatron"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'laga-attn[megatron]'" in result.stderr.splitlines()[-1]
