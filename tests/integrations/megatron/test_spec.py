"""`with_laga` finds every MLA layer in a spec, changes nothing else, and says what it cannot replace."""

from __future__ import annotations

import functools

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from laga_attn.integrations.megatron import with_laga
from laga_attn.integrations.megatron.core_attention import LatentCoreAttention
from laga_attn.integrations.megatron.layer import LATENT_LAYERS, LatentMLASelfAttention


def layer_spec(**arguments):
    return get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, **arguments)


def options_of(layer):
    core = layer.submodules.self_attention.submodules.core_attention
    return core.params["options"]


def test_a_layer_spec_gets_the_layer_and_its_core_attention_and_keeps_the_rest():
    stock = layer_spec()
    before = repr(stock)
    new = with_laga(stock, scheme="absorbed", ulysses_degree=2, save="gathered")
    attention, stock_attention = new.submodules.self_attention, stock.submodules.self_attention
    assert attention.module is LatentMLASelfAttention
    assert attention.params == stock_attention.params
    assert attention.submodules.core_attention.module is LatentCoreAttention
    assert (options_of(new).scheme, options_of(new).ulysses_degree, options_of(new).save) == ("absorbed", 2, "gathered")
    for name in ("linear_q_down_proj", "linear_kv_up_proj", "linear_proj", "kv_layernorm"):
        assert getattr(attention.submodules, name) is getattr(stock_attention.submodules, name)
    assert new.submodules.mlp is stock.submodules.mlp
    assert repr(stock) == before


def test_an_attention_spec_by_itself():
    assert with_laga(layer_spec().submodules.self_attention).module is LatentMLASelfAttention


def test_a_block_spec_with_shared_partial_and_lazily_named_layers():
    lazy = layer_spec()
    lazy.submodules.self_attention.module = (MLASelfAttention.__module__, "MLASelfAttention")
    partial = functools.partial(object, submodules=layer_spec().submodules)
    block = with_laga(TransformerBlockSubmodules(layer_specs=[layer_spec(), lazy, partial]))
    first, second, third = block.layer_specs
    assert first.submodules.self_attention.module is LatentMLASelfAttention
    assert second.submodules.self_attention.module is LatentMLASelfAttention
    assert third.keywords["submodules"].self_attention.module is LatentMLASelfAttention


def test_layers_may_have_different_schemes_and_may_be_changed_again():
    specs = [with_laga(layer_spec(), scheme=scheme) for scheme in ("laga", "absorbed", "explicit")]
    assert [options_of(spec).scheme for spec in specs] == ["laga", "absorbed", "explicit"]
    again = with_laga(specs[0], scheme="auto")
    assert options_of(again).scheme == "auto"
    assert again.submodules.self_attention.module is LatentMLASelfAttention
    stock_core = layer_spec().submodules.self_attention.submodules.core_attention
    assert again.submodules.self_attention.submodules.core_attention.params["reference"] is stock_core


def test_a_spec_without_mla_is_refused():
    with pytest.raises(ValueError, match=r"no MLA layer in this spec .*multi_latent_attention=True"):
        with_laga(get_gpt_layer_local_spec())


def test_an_unknown_kind_of_mla_layer_is_refused():
    class Special(MLASelfAttention):
        pass

    spec = layer_spec().submodules.self_attention
    unknown = ModuleSpec(module=Special, params=spec.params, submodules=spec.submodules)
    supported = ", ".join(layer.__name__ for layer in LATENT_LAYERS)
    with pytest.raises(ValueError, match=rf"Special may compute more than plain MLA.*{supported}"):
        with_laga(unknown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "ring"}, "unknown scheme 'ring'; choose one of explicit, absorbed, laga, auto"),
        ({"scheme": "explicit", "save": "gathered"}, "save='gathered' is not possible with scheme 'explicit'"),
        ({"scheme": "auto", "save": "kv"}, "save='kv' is not possible with scheme 'auto'"),
        ({"ulysses_degree": 0}, "ulysses_degree=0 must be 'auto' or a divisor"),
        ({"ulysses_degree": True}, "ulysses_degree=True must be"),
    ],
)
def test_options_that_do_not_exist_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        with_laga(layer_spec(), **arguments)
