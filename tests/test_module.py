"""MultiheadLatentAttention: the layer of Transformers, whole and split over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as hf_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf_v3

from laga_attn.attention import latent_attention
from laga_attn.config import MLAConfig
from laga_attn.grid import ContextParallel
from laga_attn.layout import LayoutKind, SequenceLayout
from laga_attn.module import MultiheadLatentAttention
from laga_attn.rope import rope_cos_sin
from tests.compare import assert_bitwise, assert_close, relative_error
from tests.pool import RankContext, RankGroup

Ranks = Callable[[int], RankGroup]
Gradients = dict[str, Tensor]

YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4,
    "beta_slow": 0.25,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
# All sizes differ; rms_norm_eps is one that would show if the norms of the latents took it.
BASE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 0.1,
    "max_position_embeddings": 64,
    "attention_bias": False,
    "rope_scaling": YARN,
    "rope_theta": 100.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "query latent, YaRN": BASE,
    "one query projection, plain RoPE": {**BASE, "q_lora_rank": None, "rope_scaling": None},
    "biases, halves paired": {**BASE, "attention_bias": True, "rope_interleave": False},
    "DeepSeek-V2": {**BASE, "model_type": "deepseek_v2"},
}


@dataclass(frozen=True)
class Job:
    """One layer applied to one batch of sequences or to one pack of documents, with a gradient for the output."""

    source: dict[str, Any]
    lengths: tuple[int, ...] = (29,)
    kind: LayoutKind = "zigzag"
    batch: int = 2
    ulysses_degree: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the layer
    forward: dict[str, Any] = field(default_factory=dict)  # of its forward
    pad: float = 0.0

    def layout(self, size: int) -> SequenceLayout:
        offsets = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        return SequenceLayout.packed(offsets, size, kind=self.kind)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Hidden states and the gradient of the output, ``[B, S, hidden]``."""
        generator = torch.Generator().manual_seed(7)
        shape = (2, self.batch, sum(self.lengths), self.source["hidden_size"])
        x, dout = torch.randn(shape, dtype=torch.float64, generator=generator)
        return x, dout


def hf_layer(source: dict[str, Any], dtype: torch.dtype = torch.float64) -> nn.Module:
    """The attention layer of Transformers, with every parameter random (norms and biases too)."""
    config = AutoConfig.for_model(**source)
    config._attn_implementation = "sdpa"
    v2 = config.model_type == "deepseek_v2"
    layer = (hf_v2.DeepseekV2Attention if v2 else hf_v3.DeepseekV3Attention)(config, layer_idx=0)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in layer.named_parameters():
        spread = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * spread if "layernorm" in name else 0.3 * spread
    return layer.to(dtype)


def with_exact_norms(layer: nn.Module) -> nn.Module:
    """Transformers computes its norms in fp32 whatever the dtype; the same ones, in fp64."""
    for name, norm in list(layer.named_children()):
        if name.endswith("layernorm"):
            exact = nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon)
            exact.weight = norm.weight
            setattr(layer, name, exact)
    return layer


def apply_hf(layer: nn.Module, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
    cos, sin = rope_cos_sin(MLAConfig.from_hf(layer.config), positions, dtype=x.dtype)
    if layer.config.model_type == "deepseek_v2":
        angles: Any = torch.complex(cos, sin)
    else:
        angles = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    out: Tensor = layer(hidden_states=x, position_embeddings=angles, attention_mask=mask)[0]
    return out


def expected(job: Job) -> tuple[Tensor, Tensor, Gradients]:
    """Output, gradient of the input and of the parameters: every document by itself, on one process."""
    layer = with_exact_norms(hf_layer(job.source))
    x, dout = job.tensors()
    x.requires_grad_()
    documents = x.split(job.lengths, dim=1)
    out = torch.cat([apply_hf(layer, d, torch.arange(d.shape[1])[None]) for d in documents], dim=1)
    out.backward(dout)
    assert x.grad is not None
    return out.detach(), x.grad, {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def build(job: Job, cp: ContextParallel | None = None) -> MultiheadLatentAttention:
    layer = MultiheadLatentAttention(MLAConfig.from_hf(job.source), cp=cp, dtype=torch.float64, **job.options)
    layer.load_state_dict(hf_layer(job.source).state_dict(), strict=True)
    return layer


def run(ctx: RankContext, job: Job) -> tuple[Tensor, Tensor, Gradients]:
    """The same on one rank: its rows, and its part of the parameters' gradients."""
    layout = job.layout(ctx.size)
    layer = build(job, ContextParallel(ctx.group, job.ulysses_degree))
    x, dout = (layout.shard(t, ctx.rank, pad_value=job.pad) for t in job.tensors())
    x.requires_grad_()
    out = layer(x, layout, **job.forward)
    out.backward(dout)
    return out.detach(), x.grad, {name: p.grad for name, p in layer.named_parameters()}


def split_over(ranks: Ranks, size: int, job: Job) -> tuple[Tensor, Tensor, Gradients]:
    """The results of all ranks, put together again."""
    outs, dxs, gradients = zip(*ranks(size).run(run, job), strict=True)
    total = {name: torch.stack([g[name] for g in gradients]).sum(0) for name in gradients[0]}
    layout = job.layout(size)
    return layout.unshard(outs), layout.unshard(dxs), total


def assert_same(
    actual: tuple[Tensor, Tensor, Gradients], reference: tuple[Tensor, Tensor, Gradients], rel: float = 1e-10
) -> None:
    assert_close(actual[0], reference[0], rel=rel, name="out")
    assert_close(actual[1], reference[1], rel=rel, name="dx")
    assert actual[2].keys() == reference[2].keys()
    for name, gradient in actual[2].items():
        assert_close(gradient, reference[2][name], rel=rel, name=name)


# Equal to Transformers.


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_the_split_layer_is_that_of_transformers(ranks: Ranks, model: str, size: int) -> None:
    """29 tokens: on several ranks some rows are pads."""
    job = Job(MODELS[model])
    rel = 1e-6 if model == "DeepSeek-V2" else 1e-10  # Transformers rotates in fp32 there
    assert_same(split_over(ranks, size, job), expected(job), rel)


@pytest.mark.parametrize("scheme", ["laga", "explicit", "absorbed", "auto"])
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_every_scheme_and_layout_gives_the_same_layer(ranks: Ranks, scheme: str, kind: LayoutKind) -> None:
    job = Job(BASE, kind=kind, ulysses_degree=2, options={"scheme": scheme})
    assert_same(split_over(ranks, 4, job), expected(job))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed_documents_are_as_if_alone(ranks: Ranks, size: int) -> None:
    job = Job(BASE, lengths=(5, 9, 16), batch=1)
    assert_same(split_over(ranks, size, job), expected(job))


@pytest.mark.parametrize("model", MODELS)
def test_fp32_layer_is_the_untouched_one_of_transformers(model: str) -> None:
    """Norms, rotary embedding and attention as they come."""
    job = Job(MODELS[model])
    theirs = hf_layer(job.source, torch.float32)
    v2 = theirs.config.model_type == "deepseek_v2"
    rotary = (hf_v2.DeepseekV2RotaryEmbedding if v2 else hf_v3.DeepseekV3RotaryEmbedding)(theirs.config)
    x = job.tensors()[0].float()
    angles = rotary(x, torch.arange(29)[None])
    reference = theirs(hidden_states=x, position_embeddings=angles, attention_mask=None)[0]
    assert_close(build(job).float()(x, job.layout(1)), reference, rel=3e-6)


def test_state_dicts_are_interchangeable() -> None:
    for source in MODELS.values():
        theirs, ours = hf_layer(source), MultiheadLatentAttention(MLAConfig.from_hf(source), dtype=torch.float64)
        shapes = {name: tensor.shape for name, tensor in ours.state_dict().items()}
        assert shapes == {name: tensor.shape for name, tensor in theirs.state_dict().items()}
        ours.load_state_dict(theirs.state_dict(), strict=True)
        theirs.load_state_dict(ours.state_dict(), strict=True)


def test_the_softmax_scale_of_yarn_reaches_attention() -> None:
    job, plain_scale = Job(BASE), 20**-0.5
    x, layout = job.tensors()[0], job.layout(1)
    theirs = apply_hf(with_exact_norms(hf_layer(BASE)), x, torch.arange(29)[None])
    layer = build(job)
    assert layer.softmax_scale == pytest.approx((0.07 * 2.0794415 + 1) ** 2 * plain_scale)
    assert_close(layer(x, layout), theirs, rel=1e-10)
    other = build(Job(BASE, options={"softmax_scale": plain_scale}))(x, layout)
    assert relative_error(other, theirs) > 1e-2


# Options of forward.


@pytest.mark.parametrize(
    ("forward", "sees"),
    [
        ({"causal": False}, lambda distance: distance > -1000),
        ({"window": 6}, lambda distance: (distance >= 0) & (distance < 6)),
    ],
)
def test_masks_are_those_of_an_explicit_mask(ranks: Ranks, forward: dict[str, Any], sees: Any) -> None:
    job = Job(BASE, forward=forward)
    positions = torch.arange(29)
    mask = sees(positions[:, None] - positions[None, :])[None, None]
    reference = apply_hf(with_exact_norms(hf_layer(BASE)), job.tensors()[0], positions[None], mask)
    assert_close(split_over(ranks, 2, job)[0], reference.detach(), rel=1e-10)


@pytest.mark.parametrize("per_sequence", [False, True])
def test_given_positions_replace_those_of_the_layout(per_sequence: bool) -> None:
    job = Job(BASE)
    positions = torch.arange(29) * 2 + 1
    if per_sequence:
        positions = torch.stack((positions, torch.arange(29).flip(0)))
    x = job.tensors()[0]
    reference = apply_hf(with_exact_norms(hf_layer(BASE)), x, positions if per_sequence else positions[None])
    assert_close(build(job)(x, job.layout(1), positions), reference, rel=1e-10)
    assert relative_error(build(job)(x, job.layout(1)), reference) > 1e-3


def test_options_reach_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def spy(*tensors: Tensor, **options: Any) -> Tensor:
        given.update(options)
        return latent_attention(*tensors, **options)

    monkeypatch.setattr("laga_attn.module.latent_attention", spy)
    options = {"scheme": "explicit", "save": "kv", "kernel": "reference", "head_group": 3, "softmax_scale": 0.5}
    forward = {"causal": True, "window": 7}
    job = Job(BASE)
    layer = build(Job(BASE, options=options))
    layer(job.tensors()[0], job.layout(1), **forward)
    assert {name: given[name] for name in (*options, *forward)} == options | forward
    assert given["cp"] is layer.cp
    assert given["layout"] == job.layout(1)


# Pads, dtypes, modes.


@pytest.mark.parametrize("model", ["query latent, YaRN", "biases, halves paired"])
def test_what_pads_contain_changes_nothing(ranks: Ranks, model: str) -> None:
    """NaN in the pads of the input and of the output's gradient: same bits, and exact zeros in the pads."""
    clean, poisoned = (ranks(2).run(run, Job(MODELS[model], pad=pad)) for pad in (0.0, float("nan")))
    layout = Job(BASE).layout(2)
    for rank, (a, b) in enumerate(zip(clean, poisoned, strict=True)):
        for name, x, y in (("out", a[0], b[0]), ("dx", a[1], b[1]), *((n, a[2][n], b[2][n]) for n in a[2])):
            assert_bitwise(y, x, name=name)
        pads = torch.from_numpy(layout.rows(rank) < 0)
        assert pads.any() or rank != 0
        assert (b[0][:, pads] == 0).all()
        assert (b[1][:, pads] == 0).all()


@pytest.mark.filterwarnings("error")
def test_bf16_and_autocast_stay_close_to_fp64() -> None:
    job = Job(BASE)
    x, layout = job.tensors()[0], job.layout(1)
    exact = build(job)(x, layout)
    layer = build(job).bfloat16()
    out = layer(x.bfloat16(), layout)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, exact) < 3e-2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = build(job).float()(x.float(), layout)
    assert mixed.dtype == torch.bfloat16
    assert relative_error(mixed, exact) < 3e-2


def test_layers_copy_and_show_what_they_are() -> None:
    job = Job(BASE)
    x, layout, layer = job.tensors()[0], job.layout(1), build(job)
    assert_bitwise(copy.deepcopy(layer)(x, layout), layer(x, layout))
    assert "scheme='laga', cp_size=1, softmax_scale=0.293" in repr(layer)


def test_the_layer_of_deepseek_v3_runs_without_memory() -> None:
    cfg, layout = MLAConfig.preset("deepseek-v3"), SequenceLayout.zigzag(4096, 1)
    with FakeTensorMode():
        layer = MultiheadLatentAttention(cfg, dtype=torch.bfloat16)
        x = torch.empty(1, 4096, cfg.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        out = layer(x, layout)
        out.sum().backward()
        assert x.grad is not None
        assert out.shape == x.grad.shape == (1, 4096, 7168)
        assert layer.kv_b_proj.weight.grad is not None
        assert layer.kv_b_proj.weight.grad.shape == (128 * 256, 512)


# Errors.


def call_wrongly(ctx: RankContext, what: str) -> None:
    job = Job(BASE)
    layout = job.layout(ctx.size)
    layer = build(job, ContextParallel(ctx.group))
    x = layout.shard(job.tensors()[0], ctx.rank)
    if what == "layout":
        layer(x, job.layout(4))
    elif what == "tokens on one rank":
        layer(x[:, ctx.rank :], layout)
    elif what == "positions on one rank":
        layer(x, layout, torch.arange(x.shape[1] - ctx.rank))
    elif what == "hidden size":
        layer(x[..., 1:], layout)
    elif what == "adapter":
        layer.kv_b_proj = nn.Sequential(layer.kv_b_proj)
        layer(x, layout)
    elif what == "scheme":
        build(Job(BASE, options={"scheme": "latent"}), layer.cp)(x, layout)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("layout", "layout is for 4 ranks, the group has 2"),
        ("tokens on one rank", r"rank 1: hidden_states must be \[B, 16, 48\].*got \[2, 15, 48\].*layout.shard"),
        ("positions on one rank", r"rank 1: positions must be \[16\] or \[2, 16\].*got \[15\]"),
        ("hidden size", r"got \[2, 16, 47\]"),
        ("adapter", "kv_b_proj is now a Sequential.*merge the adapter"),
        ("scheme", "unknown scheme 'latent'"),
    ],
)
def test_misuse_raises_on_every_rank(ranks: Ranks, what: str, message: str) -> None:
    ranks(2).run_raises(call_wrongly, what, match=message)
