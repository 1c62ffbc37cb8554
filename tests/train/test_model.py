from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from laga_attn.presets import preset_names
from laga_attn.train.errors import UsageError
from laga_attn.train.model import build, check, export, find_model, optimizer_groups
from laga_attn.train.options import TrainOptions, arrange
from tests.compare import assert_bitwise
from tests.train.micro import MICRO, micro_options, write_micro

CPU = torch.device("cpu")


@pytest.fixture
def options(tmp_path) -> TrainOptions:
    write_micro(tmp_path)
    return micro_options(tmp_path, "run")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_model_that_can_be_trained(name):
    source = find_model(name)
    assert source.weights is None
    check(source.config, TrainOptions(model=name), arrange(TrainOptions(), 2))


def test_tiny_is_a_byte_model_with_experts_and_yarn():
    config = find_model("tiny").config
    assert config.model_type == "deepseek_v3"
    assert config.n_routed_experts > 1
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.vocab_size < 300
    assert config.max_position_embeddings >= 4096


def test_random_weights_depend_on_the_seed_alone(options):
    source = find_model(options.model)
    torch.manual_seed(99)
    first = build(source, options, CPU)
    torch.manual_seed(7)
    again = build(source, options, CPU)
    other = build(source, micro_options(Path(options.model).parent, "run", seed=1), CPU)
    assert first.training
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_an_exported_model_is_found_with_its_weights(options, tmp_path):
    model = build(find_model(options.model), options, CPU)
    export(model, tmp_path / "exported")
    assert not list(tmp_path.glob(".unfinished*"))
    source = find_model(str(tmp_path / "exported"))
    assert source.weights == tmp_path / "exported"
    loaded = dict(build(source, options, CPU).named_parameters())
    for name, value in model.named_parameters():
        assert_bitwise(loaded[name].detach(), value.detach(), name=name)


def test_bf16_weights_on_disk_are_trained_in_fp32(options, tmp_path):
    model = build(find_model(options.model), options, CPU).bfloat16()
    export(model, tmp_path / "exported")
    loaded = build(find_model(str(tmp_path / "exported")), options, CPU)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert_bitwise(loaded.lm_head.weight.detach(), model.lm_head.weight.detach().float())


def test_an_interrupted_export_leaves_nothing_under_its_name(options, tmp_path, monkeypatch):
    model = build(find_model(options.model), options, CPU)
    original = type(model).save_pretrained

    def full(self, folder, **kwargs):
        original(self, folder, **kwargs)
        raise OSError("disk full")

    monkeypatch.setattr(type(model), "save_pretrained", full)
    with pytest.raises(OSError, match="disk full"):
        export(model, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    monkeypatch.undo()
    (tmp_path / "exported").mkdir()
    export(model, tmp_path / "exported")
    assert find_model(str(tmp_path / "exported")).weights is not None


def test_matrices_decay_and_vectors_do_not(options):
    model = build(find_model(options.model), options, CPU)
    decaying, plain = optimizer_groups(model, 0.1)
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert min(p.ndim for p in decaying["params"]) == 2
    assert {p.ndim for p in plain["params"]} == {1}
    assert len(decaying["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_activation_checkpointing_recomputes_the_layers(options):
    folder = Path(options.model).parent
    source = find_model(options.model)
    tokens = torch.arange(32)[None]
    saved = {}
    for on in (False, True):
        model = build(source, micro_options(folder, "run", activation_checkpointing=on), CPU)
        count = 0

        def pack(tensor):
            nonlocal count
            count += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=tokens, use_cache=False)
        saved[on] = count
    assert saved[True] < saved[False] / 2


def test_a_config_of_unknown_type_is_refused_with_the_reason(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MICRO, "model_type": "nobody_knows"}))
    with pytest.raises(UsageError, match=r"not a Hugging Face model config \(.*nobody_knows"):
        find_model(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a Hugging Face model config"):
        find_model(str(tmp_path))
