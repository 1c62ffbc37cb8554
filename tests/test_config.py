"""MLAConfig: published values, Hugging Face round trips, and errors that say what to do."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from laga_attn.config import MLAConfig, RopeScaling, yarn_mscale
from laga_attn.presets import hf_config, preset_names

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16,
    "beta_slow": 2,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
}


def hf(**keys: Any) -> dict[str, Any]:
    return {"model_type": "deepseek_v3", **SIZES, "max_position_embeddings": 512, **keys}


# The published layers.


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("deepseek-v3", 0.135234),
        ("deepseek-v2", 0.114721),
        ("deepseek-v2-lite", 0.114721),
        ("moonlight-16b", 192**-0.5),
        ("glm-4.7-flash", 256**-0.5),
    ],
)
def test_softmax_scale_of_published_models(name: str, scale: float) -> None:
    assert MLAConfig.preset(name).softmax_scale == pytest.approx(scale, abs=1e-6)


@pytest.mark.parametrize(
    ("factor", "mscale_all_dim", "m"),
    [(40.0, 1.0, 1.368888), (40.0, 0.707, 1.260804), (1.0, 1.0, 1.0), (40.0, None, 1.0), (40.0, 0.0, 1.0)],
)
def test_softmax_scale_follows_mscale_all_dim(factor: float, mscale_all_dim: float | None, m: float) -> None:
    scaling = RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=4096,
        mscale=0.3,  # must not matter
        mscale_all_dim=mscale_all_dim,
    )
    cfg = replace(MLAConfig.preset("deepseek-v3"), rope_scaling=scaling)
    assert cfg.softmax_scale == pytest.approx(m**2 / 192**0.5, abs=1e-6)


def test_plain_rope_ignores_a_leftover_mscale() -> None:
    leftover = RopeScaling(factor=40.0, mscale_all_dim=1.0)
    plain = replace(MLAConfig.preset("deepseek-v3"), rope_scaling=leftover)
    assert plain.softmax_scale == pytest.approx(192**-0.5, abs=1e-12)


@pytest.mark.parametrize("name", preset_names())
def test_softmax_scale_is_that_of_the_transformers_layer(name: str) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    config = AutoConfig.for_model(**hf_config(name))
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    assert MLAConfig.preset(name).softmax_scale == pytest.approx(
        yarn_apply_mscale(config.rope_parameters, width**-0.5), rel=1e-12
    )


def test_sizes_of_deepseek_v3() -> None:
    cfg = MLAConfig.preset("deepseek-v3")
    assert (cfg.hidden_size, cfg.num_attention_heads) == (7168, 128)
    assert (cfg.q_lora_rank, cfg.kv_lora_rank) == (1536, 512)
    assert (cfg.qk_nope_head_dim, cfg.qk_rope_head_dim) == (128, 64)
    assert (cfg.qk_head_dim, cfg.v_head_dim) == (192, 128)
    assert (cfg.max_position_embeddings, cfg.rope_theta, cfg.rope_scaling.factor) == (163840, 10000.0, 40)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm-4.7-flash"])
def test_presets_agree_with_the_defaults_of_transformers(name: str) -> None:
    """Transformers' configuration classes default to one published model each."""
    published = hf_config(name)
    theirs = AutoConfig.for_model(published["model_type"]).to_dict()
    keys = ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    if name in ("deepseek-v3", "glm-4.7-flash"):
        keys += ["hidden_size", "q_lora_rank", "num_attention_heads", "num_hidden_layers", "n_routed_experts"]
        keys += ["n_group", "topk_group", "routed_scaling_factor", "vocab_size", "rms_norm_eps"]
    for key in keys:
        assert published[key] == theirs[key], key


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_builds_the_whole_models_config(name: str) -> None:
    config = AutoConfig.for_model(**hf_config(name))
    assert MLAConfig.from_hf(config) == MLAConfig.preset(name)
    assert config.num_experts_per_tok < config.n_routed_experts
    assert config.vocab_size > 256


def test_preset_dicts_are_the_callers_own() -> None:
    hf_config("deepseek-v3")["rope_scaling"]["factor"] = 1
    assert hf_config("deepseek-v3")["rope_scaling"]["factor"] == 40


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'deepseek-v4'.*deepseek-v2-lite.*tiny"):
        MLAConfig.preset("deepseek-v4")


# Reading and writing.


@pytest.mark.parametrize("name", preset_names())
def test_round_trip_keeps_the_config(name: str) -> None:
    cfg = MLAConfig.preset(name)
    assert MLAConfig.from_hf(cfg.to_hf()) == cfg


@pytest.mark.parametrize("name", preset_names())
def test_round_trip_keeps_every_mla_and_rope_key_of_the_source(name: str) -> None:
    source = hf_config(name)
    written = MLAConfig.from_hf(source).to_hf()
    parts = ("lora", "rope", "head_dim", "attention_heads", "rotary", "position")
    keys = {key for key in source if any(part in key for part in parts)}
    assert len(keys) >= 9
    for key in keys - {"rope_scaling"}:
        assert written[key] == source[key], key
    for key, value in (source["rope_scaling"] or {}).items():
        assert written["rope_scaling"][key] == value, key
        assert written["rope_parameters"][key] == value, key


@pytest.mark.parametrize("name", preset_names())
def test_written_keys_rebuild_the_transformers_config(name: str) -> None:
    source = hf_config(name)
    theirs = AutoConfig.for_model(**source)
    again = AutoConfig.for_model(**{**source, **MLAConfig.from_hf(source).to_hf()})
    ours = {**again.rope_parameters, "truncate": None}
    assert {**theirs.rope_parameters, "truncate": None}.items() <= ours.items()
    for key in (*SIZES, "rms_norm_eps", "attention_bias", "max_position_embeddings"):
        assert getattr(again, key) == getattr(theirs, key), key


def test_old_and_new_spelling_of_rope_are_the_same() -> None:
    yarn = {**YARN, "type": "yarn"}
    old = MLAConfig.from_hf(hf(rope_theta=5e4, rope_scaling=yarn))
    new = MLAConfig.from_hf(hf(rope_parameters={"rope_theta": 5e4, **YARN}))
    assert old == new
    assert old.rope_theta == 5e4
    expected = RopeScaling(
        rope_type="yarn",
        factor=8,
        original_max_position_embeddings=64,
        beta_fast=16,
        beta_slow=2,
        mscale=0.8,
        mscale_all_dim=0.6,
    )
    assert old.rope_scaling == expected


def test_yarn_lengths_fill_in_as_transformers_does() -> None:
    """Without a factor it is the ratio of the lengths; a length beside the RoPE keys goes first."""
    gaps = {k: v for k, v in YARN.items() if k not in ("factor", "original_max_position_embeddings")}
    cfg = MLAConfig.from_hf(hf(rope_scaling=gaps, original_max_position_embeddings=128))
    assert (cfg.rope_scaling.factor, cfg.rope_scaling.original_max_position_embeddings) == (4.0, 128)
    cfg = MLAConfig.from_hf(hf(rope_scaling=YARN, original_max_position_embeddings=128))
    assert (cfg.rope_scaling.factor, cfg.rope_scaling.original_max_position_embeddings) == (8.0, 128)
    cfg = MLAConfig.from_hf(hf(rope_scaling={**gaps, "factor": 2.0}))
    assert (cfg.rope_scaling.factor, cfg.rope_scaling.original_max_position_embeddings) == (2.0, 512)


def test_another_head_dim_of_hugging_face_is_never_read() -> None:
    assert MLAConfig.from_hf(hf(head_dim=77)) == MLAConfig.from_hf(hf())


def test_null_and_absent_query_latent_are_the_same() -> None:
    absent = {k: v for k, v in hf().items() if k != "q_lora_rank"}
    assert MLAConfig.from_hf(hf(q_lora_rank=None)) == MLAConfig.from_hf(absent)
    assert MLAConfig.from_hf(absent).q_lora_rank is None
    assert MLAConfig.from_hf(absent).to_hf()["q_lora_rank"] is None


@pytest.mark.parametrize(
    ("keys", "interleave"),
    [
        ({}, True),
        ({"rope_interleave": None}, True),
        ({"rope_interleave": False}, False),
        ({"model_type": "deepseek_v2"}, True),
        ({"model_type": "minicpm3"}, False),
    ],
)
def test_rope_interleave_defaults_to_what_the_model_computes(keys: dict[str, Any], interleave: bool) -> None:
    assert MLAConfig.from_hf(hf(**keys)).rope_interleave is interleave


def test_reads_a_file_a_folder_a_dict_and_a_config_object(tmp_path: Path) -> None:
    source = hf_config("tiny")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(source))
    expected = MLAConfig.from_hf(source)
    for given in (file, str(file), tmp_path, str(tmp_path), AutoConfig.for_model(**source)):
        assert MLAConfig.from_hf(given) == expected
    AutoConfig.for_model(**source).save_pretrained(tmp_path)  # in the spelling of Transformers 5
    assert "rope_parameters" in json.loads(file.read_text())
    assert MLAConfig.from_hf(tmp_path) == expected


def test_reading_does_not_import_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config("tiny")))
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from laga_attn.config import MLAConfig\n"
        f"assert MLAConfig.from_hf({str(tmp_path)!r}) == MLAConfig.preset('tiny')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_multimodal_config_is_read_at_its_language_model() -> None:
    text, vision = hf(model_type="kimi_k2"), {"hidden_size": 8}
    nested = {"model_type": "kimi_k25", "text_config": text, "vision_config": vision}
    assert MLAConfig.from_hf(nested) == MLAConfig.from_hf(hf())


def test_unknown_mla_keys_warn_and_survive() -> None:
    rope = {"rope_theta": 1e4, **YARN, "llama_4_scaling_beta": 0.1}
    source = hf(mla_scale_q_lora=True, rope_parameters=rope)
    with pytest.warns(UserWarning, match="llama_4_scaling_beta, mla_scale_q_lora") as record:
        cfg = MLAConfig.from_hf(source)
    assert record[0].filename == __file__
    written = cfg.to_hf()
    assert written["mla_scale_q_lora"] is True
    assert written["rope_parameters"]["llama_4_scaling_beta"] == 0.1
    with pytest.warns(UserWarning, match="mla_scale_q_lora"):
        assert MLAConfig.from_hf(written) == cfg


def test_keys_that_are_off_or_have_nothing_to_do_with_mla_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MLAConfig.from_hf(hf(mla_use_nope=False, index_topk=None, n_routed_experts=8, head_dim=8))


def test_other_rope_types_are_kept_whole() -> None:
    longrope = {"rope_type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [1.0, 4.0], "factor": 2.0}
    with pytest.warns(UserWarning, match="long_factor, short_factor"):
        cfg = MLAConfig.from_hf(hf(rope_scaling=longrope))
    assert {k: cfg.to_hf()["rope_scaling"][k] for k in longrope} == longrope


def test_partial_rotary_factor_is_found_beside_rope_parameters_and_in_them() -> None:
    ratio = 8 / 20
    beside = MLAConfig.from_hf(hf(rope_theta=5e4, partial_rotary_factor=ratio))
    inside = MLAConfig.from_hf(hf(rope_parameters={"rope_theta": 5e4, "partial_rotary_factor": ratio}))
    assert beside == inside
    assert beside.to_hf()["partial_rotary_factor"] == ratio
    assert beside.to_hf()["rope_parameters"]["partial_rotary_factor"] == ratio


def test_a_latent_norm_epsilon_of_its_own_survives() -> None:
    cfg = replace(MLAConfig.preset("tiny"), latent_norm_eps=1e-5)
    assert MLAConfig.from_hf(cfg.to_hf()) == cfg
    assert MLAConfig.from_hf(hf(rms_norm_eps=1e-5)).latent_norm_eps == 1e-6


def test_configs_hash_copy_and_pickle() -> None:
    cfg = MLAConfig.from_hf(hf(partial_rotary_factor=1.0))
    assert hash(cfg) == hash(MLAConfig.from_hf(hf(partial_rotary_factor=1.0)))
    assert pickle.loads(pickle.dumps(cfg)) == copy.deepcopy(cfg) == cfg


# Errors.


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kv_lora_rank": None}, "no kv_lora_rank: not an MLA model"),
        ({"v_head_dim": None, "hidden_size": None}, "lacks hidden_size, v_head_dim"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even.*got 7"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer; got 0"),
        ({"q_lora_rank": 0}, "q_lora_rank must be a positive integer, or None.*got 0"),
        ({"v_head_dim": 10.5}, "v_head_dim must be a positive integer; got 10.5"),
        ({"rope_theta": -1.0}, "rope_theta must be positive; got -1"),
        ({"qk_head_dim": 12}, r"qk_head_dim=12 must be .* = 12 \+ 8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be 1 or .* 8/20"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor.*at least 1; got 0.5"),
        ({"rope_scaling": {**YARN, "beta_fast": 1}}, "beta_fast=1, beta_slow=2"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": -4}}, "the positive number.*got -4"),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 4.0}}, "factor=4.0.* factor=8"),
        ({"rope_parameters": {"full_attention": YARN}}, "differ by layer type .full_attention."),
    ],
)
def test_errors_name_the_value_and_the_rule(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MLAConfig.from_hf(hf(**keys))


def test_sources_that_are_no_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"deepseek-ai/DeepSeek-V3.*nothing is downloaded"):
        MLAConfig.from_hf("deepseek-ai/DeepSeek-V3")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON object, not a list"):
        MLAConfig.from_hf(tmp_path)
    with pytest.raises(ValueError, match="got a int"):
        MLAConfig.from_hf(3)


def test_yarn_mscale_is_one_for_no_stretch() -> None:
    assert [yarn_mscale(factor, 0.5) for factor in (0.5, 1.0)] == [1.0, 1.0]
    assert yarn_mscale(2.718281828459045, 0.5) == pytest.approx(1.05)
