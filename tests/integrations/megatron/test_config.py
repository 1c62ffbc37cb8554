"""MLA configurations keep their meaning on the way to Megatron and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig

from laga_attn import MLAConfig
from laga_attn.config import RopeScaling
from laga_attn.integrations.megatron import config_from_megatron, config_to_megatron
from laga_attn.presets import preset_names
from tests.integrations.megatron.models import Model, build, config_of
from tests.integrations.megatron.world import Parallel, megatron_ranks

pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated")


def megatron(**arguments) -> MLATransformerConfig:
    return MLATransformerConfig(num_layers=1, use_cpu_initialization=True, **arguments)


def same_norms(config: MLAConfig) -> MLAConfig:
    """What both sides can express: Megatron has one epsilon for all norms, and keeps no unread keys."""
    scaling, eps = replace(config.rope_scaling, partial_rotary_factor=None, extra={}), config.rms_norm_eps
    config = replace(config, latent_norm_eps=eps, rope_interleave=True, attention_bias=False)
    return replace(config, rope_scaling=scaling, extra={})


@pytest.mark.parametrize("name", preset_names())
def test_published_models_survive_the_round_trip(name):
    config = same_norms(MLAConfig.preset(name))
    back = config_from_megatron(megatron(**config_to_megatron(config)))
    ignored = {"max_position_embeddings": config.max_position_embeddings}
    if config.rope_scaling.rope_type != "yarn":
        assert replace(back, **ignored) == config
    else:
        assert replace(back, rope_scaling=config.rope_scaling, **ignored) == config
        for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            assert getattr(back.rope_scaling, key) == getattr(config.rope_scaling, key)
    assert back.softmax_scale == pytest.approx(config.softmax_scale, rel=1e-12)
    assert back.rope_scaling.cos_sin_factor == pytest.approx(config.rope_scaling.cos_sin_factor, rel=1e-12)


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "attention_factor"),
    [(1.0, 1.0, None), (0.707, 0.707, None), (1.0, None, None), (None, None, None), (0.7, 0.9, None), (1.0, 0.5, 1.25)],
)
def test_every_way_to_set_yarns_temperature_means_the_same(mscale, mscale_all_dim, attention_factor):
    scaling = RopeScaling(
        rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=mscale,
        mscale_all_dim=mscale_all_dim, attention_factor=attention_factor,
    )  # fmt: skip
    config = replace(same_norms(MLAConfig.preset("deepseek-v3")), rope_scaling=scaling)
    back = config_from_megatron(megatron(**config_to_megatron(config)))
    assert back.softmax_scale == pytest.approx(config.softmax_scale, rel=1e-12)
    assert back.rope_scaling.cos_sin_factor == pytest.approx(scaling.cos_sin_factor, rel=1e-12)


def scales(ctx) -> list[tuple[float, float, float, float]]:
    with megatron_ranks(Parallel()):
        found = []
        for rope_type in ("rope", "yarn"):
            model = Model(rope_type=rope_type)
            ours = config_from_megatron(config_of(model, Parallel()))
            attention = build(model, Parallel()).decoder.layers[0].self_attention
            mscale = attention.rotary_pos_emb(8)[1] if rope_type == "yarn" else 1.0
            factors = (ours.rope_scaling.cos_sin_factor, mscale)
            found.append((ours.softmax_scale, attention.softmax_scale, *factors))
    return found


def test_scales_are_those_that_megatron_computes_with(ranks):
    for ours, theirs, cos_sin, mscale in ranks(4).run(scales)[0]:
        assert ours == pytest.approx(theirs, rel=1e-12)
        assert cos_sin == pytest.approx(mscale, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"add_bias_linear": True}, "add_bias_linear=True has no counterpart.*must be False"),
        ({"qk_layernorm": False}, "qk_layernorm=False has no counterpart"),
        ({"rotary_percent": 0.5}, r"rotary_percent=0\.5"),
        ({"mscale_all_dim": 1.0}, r"mscale_all_dim=1\.0"),
    ],
)
def test_what_ours_cannot_express_is_refused(arguments, message):
    plain = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "rope_type": "rope",
        "add_bias_linear": False,
        "qk_layernorm": True,
    }
    with pytest.raises(ValueError, match=message):
        config_from_megatron(megatron(**{**plain, **arguments}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"latent_norm_eps": 1e-3}, r"latent_norm_eps=0\.001 .*must be 1e-06"),
        ({"rope_interleave": False}, "rope_interleave=False"),
        ({"rope_scaling": RopeScaling(rope_type="longrope")}, "rope_type='longrope'"),
    ],
)
def test_what_megatron_cannot_express_is_refused(changes, message):
    config = same_norms(MLAConfig.preset("deepseek-v3"))
    with pytest.raises(ValueError, match=message):
        config_to_megatron(replace(config, **changes))


def test_a_configuration_without_mla_is_refused():
    with pytest.raises(ValueError, match="object does not describe MLA"):
        config_from_megatron(object())
