"""RoPE: the bits of Transformers, YaRN included, and the same scores from every pairing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as hf_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf_v3

from laga_attn.config import MLAConfig, RopeScaling
from laga_attn.layout import SequenceLayout
from laga_attn.presets import hf_config, preset_names
from laga_attn.rope import Pairing, apply_rope, inverse_frequencies, rope_cos_sin
from tests.compare import assert_bitwise, assert_close, relative_error

POSITIONS = torch.tensor([[0, 1, 2, 4095], [4096, 70_001, 131_071, 163_839]])
# What each published model leaves open: the temperature in cos and sin, and ends of the blend that are not whole.
EXTRA_YARN: dict[str, dict[str, Any]] = {
    "temperature outside": {"mscale": None, "mscale_all_dim": None},
    "temperature shared": {"mscale": 1.2, "mscale_all_dim": 0.7},
    "temperature given": {"attention_factor": 1.25},
    "temperature half given": {"mscale": 0.7, "mscale_all_dim": None},
    "blend beyond the last pair": {"beta_slow": 0.001},
    "not truncated": {"truncate": False, "beta_fast": 20.5, "beta_slow": 3.5},
}


def hf_of(name: str) -> dict[str, Any]:
    if name in preset_names():
        return hf_config(name)
    source = hf_config("deepseek-v3")
    yarn = source["rope_scaling"] | EXTRA_YARN[name]
    return source | {"rope_scaling": {key: value for key, value in yarn.items() if value is not None}}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# Frequencies and angles.


@pytest.mark.parametrize("name", [*preset_names(), *EXTRA_YARN])
def test_frequencies_and_angles_have_the_bits_of_transformers(name: str) -> None:
    source = hf_of(name)
    cfg = MLAConfig.from_hf(source)
    theirs = hf_v3.DeepseekV3RotaryEmbedding(AutoConfig.for_model(**source))
    assert_bitwise(inverse_frequencies(cfg), theirs.inv_freq)
    assert cfg.rope_scaling.cos_sin_factor == theirs.attention_scaling
    width = cfg.qk_rope_head_dim // 2
    expected_cos, expected_sin = theirs(random(1), POSITIONS)
    cos, sin = rope_cos_sin(cfg, POSITIONS)
    assert cos.shape == (2, 4, width)
    assert_bitwise(cos, expected_cos[..., :width])
    assert_bitwise(sin, expected_sin[..., :width])


@pytest.mark.parametrize("name", ["deepseek-v3", "moonlight-16b", "not truncated"])
def test_fp64_angles_are_the_exact_ones(name: str) -> None:
    cfg = MLAConfig.from_hf(hf_of(name))
    exact, rounded = inverse_frequencies(cfg, dtype=torch.float64), inverse_frequencies(cfg)
    assert 0 < relative_error(rounded, exact) < 1e-6
    pair = 3  # fast enough that YaRN leaves it alone
    assert exact[pair].item() == pytest.approx(cfg.rope_theta ** (-2 * pair / 64), rel=1e-15)
    cos, sin = rope_cos_sin(cfg, POSITIONS, dtype=torch.float64)
    assert_close(cos**2 + sin**2, torch.ones_like(cos), rel=1e-14)
    angles = torch.remainder(POSITIONS[..., None] * exact + torch.pi, 2 * torch.pi) - torch.pi
    assert_close(torch.atan2(sin, cos), angles, rel=1e-8)


def test_yarn_leaves_fast_pairs_alone_and_slows_slow_ones_down() -> None:
    stretched = MLAConfig.preset("deepseek-v3")
    plain = inverse_frequencies(replace(stretched, rope_scaling=RopeScaling()), dtype=torch.float64)
    ratio = plain / inverse_frequencies(stretched, dtype=torch.float64)
    turns = plain * 4096 / (2 * torch.pi)  # over the original length
    assert_close(ratio[turns > 40], torch.ones_like(ratio[turns > 40]), rel=1e-14)
    assert_close(ratio[turns < 0.8], torch.full_like(ratio[turns < 0.8], 40.0), rel=1e-14)
    between = ratio[(turns < 30) & (turns > 1.2)]
    assert len(between) > 5
    assert (between.diff() > 0).all()


def test_late_rows_of_a_rank_turn_by_their_global_position() -> None:
    """No table is cut to the local length: all ranks' angles together are those of the whole sequence."""
    cfg = MLAConfig.preset("tiny")
    layout = SequenceLayout.zigzag(64, 4)
    whole, _ = rope_cos_sin(cfg, torch.arange(64))
    parts = [rope_cos_sin(cfg, layout.positions(rank))[0] for rank in range(4)]
    assert_bitwise(layout.unshard(parts, dim=0), whole)
    assert relative_error(parts[0][-1], parts[0][8]) > 0.1  # rank 0 holds the last chunk too


def test_rope_types_that_are_not_computed_are_refused() -> None:
    cfg = replace(MLAConfig.preset("tiny"), rope_scaling=RopeScaling(rope_type="longrope", factor=4.0))
    with pytest.raises(ValueError, match="'longrope' is not computed here, only default and yarn"):
        rope_cos_sin(cfg, POSITIONS)


# Rotation.


@pytest.mark.parametrize(
    ("pairing", "reference"),
    [("half", hf_v3.apply_rotary_pos_emb), ("interleave", hf_v3.apply_rotary_pos_emb_interleave)],
)
def test_real_pairings_have_the_bits_of_transformers(pairing: Pairing, reference: Any) -> None:
    cfg = MLAConfig.preset("tiny")
    q, k = random(2, 3, 4, 16, seed=1), random(2, 1, 4, 16, seed=2)  # [B, H, s, rope]
    cos, sin = rope_cos_sin(cfg, POSITIONS)  # [B, s, rope / 2]
    expected = reference(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    for x, rotated in zip((q, k), expected, strict=True):
        assert_bitwise(apply_rope(x, cos.unsqueeze(1), sin.unsqueeze(1), pairing), rotated)


def test_complex_pairing_is_that_of_deepseek_v2() -> None:
    source = hf_config("deepseek-v2-lite")
    q, k = random(2, 3, 4, 64, seed=1), random(2, 1, 4, 64, seed=2)
    factors = hf_v2.DeepseekV2RotaryEmbedding(AutoConfig.for_model(**source))(q, POSITIONS)
    cos, sin = rope_cos_sin(MLAConfig.from_hf(source), POSITIONS)
    for x, rotated in zip((q, k), hf_v2.apply_rotary_emb(q, k, factors), strict=True):
        assert_close(apply_rope(x, cos.unsqueeze(1), sin.unsqueeze(1), "complex"), rotated, rel=2e-7)


def test_all_pairings_give_the_same_scores_from_one_set_of_weights() -> None:
    """Pairs side by side need no other weights; pairs a half apart need the same ones, sorted."""
    cfg = MLAConfig.preset("tiny")
    cos, sin = rope_cos_sin(cfg, torch.tensor([0, 5, 9_000, 60_000]), dtype=torch.float64)
    q, k = (random(4, 16, dtype=torch.float64, seed=seed) for seed in (1, 2))
    evens_then_odds = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2)))

    def scores(pairing: Pairing, order: Tensor | slice = slice(None)) -> Tensor:
        return apply_rope(q[:, order], cos, sin, pairing) @ apply_rope(k[:, order], cos, sin, pairing).T

    expected = scores("complex")
    assert_close(scores("interleave"), expected, rel=1e-14)
    assert_close(scores("half", evens_then_odds), expected, rel=1e-14)
    assert relative_error(scores("half"), expected) > 0.1  # the weights as they are would be wrong


@pytest.mark.parametrize("pairing", ["half", "interleave", "complex"])
def test_scores_depend_on_distance_alone(pairing: Pairing) -> None:
    cfg = MLAConfig.preset("tiny")
    q, k = (random(16, dtype=torch.float64, seed=seed) for seed in (1, 2))

    def score(query: int, key: int) -> Tensor:
        cos, sin = rope_cos_sin(cfg, torch.tensor([query, key]), dtype=torch.float64)
        return apply_rope(q, cos[0], sin[0], pairing) @ apply_rope(k, cos[1], sin[1], pairing)

    assert_close(score(60_007, 60_000), score(7, 0), rel=1e-10)
    assert relative_error(score(8, 0), score(7, 0)) > 1e-3


@pytest.mark.parametrize("pairing", ["half", "interleave", "complex"])
def test_inputs_stay_as_they_are_and_gradients_are_right(pairing: Pairing) -> None:
    cos, sin = rope_cos_sin(MLAConfig.preset("tiny"), torch.arange(3), dtype=torch.float64)
    wide = random(3, 20, dtype=torch.float64).requires_grad_()
    before = wide.detach().clone()
    rotated = apply_rope(wide[:, 4:], cos, sin, pairing)  # a view, as in attention
    assert rotated.untyped_storage().data_ptr() != wide.untyped_storage().data_ptr()
    assert_bitwise(wide.detach(), before)
    assert_bitwise(apply_rope(wide[:, 4:], cos, sin, pairing), rotated)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x[:, 4:], cos, sin, pairing), wide)


def test_bf16_is_rounded_once() -> None:
    cfg = MLAConfig.preset("tiny")
    x = random(4, 16, dtype=torch.bfloat16)
    exact = apply_rope(x.double(), *rope_cos_sin(cfg, POSITIONS[0], dtype=torch.float64), "interleave")
    rotated = apply_rope(x, *rope_cos_sin(cfg, POSITIONS[0]), "interleave")
    assert_bitwise(rotated, exact.to(torch.bfloat16))


def test_rotation_errors_name_the_sizes() -> None:
    cos, sin = rope_cos_sin(MLAConfig.preset("tiny"), POSITIONS)
    with pytest.raises(ValueError, match="unknown pairing 'neox'; choose one of half, interleave, complex"):
        apply_rope(random(2, 4, 16), cos, sin, "neox")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="width 18, which is not twice the 8 pairs"):
        apply_rope(random(2, 4, 18), cos, sin, "half")
