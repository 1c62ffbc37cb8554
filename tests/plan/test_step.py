"""A step of a whole model of Transformers, computed from few layers, is what tracing all layers gives."""

from __future__ import annotations

import pytest
import torch

from laga_attn.config import MLAConfig
from laga_attn.plan.hardware import load_hardware
from laga_attn.plan.step import layers_of, trace_step
from laga_attn.plan.subjects import trace_layer, trace_model
from laga_attn.plan.workload import Candidate, Workload, load_model
from laga_attn.train.errors import UsageError

H100 = load_hardware("h100")
TINY = load_model("tiny")[0]
WORK = Workload(MLAConfig.from_hf(TINY), 2048, 4)


@pytest.mark.parametrize(("scheme", "degree", "save"), [("laga", 1, "latent"), ("explicit", 4, "kv")])
def test_layers_that_are_computed_equal_layers_that_are_traced(scheme, degree, save):
    candidate, hf = Candidate(scheme, degree, save), TINY | {"num_hidden_layers": 5, "first_k_dense_replace": 2}
    step, whole = trace_step(hf, WORK, candidate, H100), trace_model(hf, WORK, candidate, 0, 2, 3)
    assert step.layers == 5
    assert step.parameter_bytes == whole.parameter_bytes
    assert step.saved_bytes == whole.saved_bytes
    assert step.port_bytes == whole.port_bytes
    assert step.flops == whole.total_flops
    assert step.peak_bytes == pytest.approx(whole.peak_bytes, rel=1e-3)
    assert step.activation_bytes == pytest.approx(whole.activation_bytes, rel=1e-3)
    # What is kept lives when backward starts, and no gradient of a parameter does yet.
    assert step.activation_bytes > step.saved_bytes
    assert step.activation_bytes > step.peak_bytes - 2 * step.parameter_bytes


def test_a_decoder_layer_moves_what_its_attention_moves_and_computes_more():
    candidate = Candidate("laga", 2, "latent")
    one, two = (trace_model(TINY, WORK, candidate, 0, dense, 0) for dense in (1, 2))
    attention = trace_layer(WORK, candidate, 0)
    assert two.port_bytes - one.port_bytes == attention.port_bytes
    assert two.part_flops("attention") - one.part_flops("attention") == attention.part_flops("attention")
    tokens, hidden, inner = WORK.layout.local_len, TINY["hidden_size"], TINY["intermediate_size"]
    mlp = 3 * 3 * 2 * tokens * hidden * inner  # gate, up and down; forward and two gradients
    assert two.total_flops - one.total_flops == attention.total_flops + mlp
    norms = 2 * hidden * 2
    assert two.parameter_bytes - one.parameter_bytes == attention.parameter_bytes + 3 * hidden * inner * 2 + norms


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (1, 1)),
        ({"num_hidden_layers": 61, "first_k_dense_replace": 3}, (3, 58)),
        ({"num_hidden_layers": 2, "first_k_dense_replace": 5}, (2, 0)),
        ({"n_routed_experts": None}, (2, 0)),
        ({"mlp_layer_types": ["dense", "sparse", "sparse"], "num_hidden_layers": 3}, (1, 2)),
    ],
)
def test_dense_and_sparse_layers_are_told_apart(changes, layers):
    assert layers_of(TINY | changes) == layers


def test_a_model_without_a_number_of_layers_is_refused():
    with pytest.raises(UsageError, match="--model-step needs num_hidden_layers"):
        layers_of({"model_type": "deepseek_v3"})
    with pytest.raises(UsageError, match="--model-step needs model_type"):
        layers_of({"num_hidden_layers": 2})


def test_the_parameters_of_a_step_are_those_of_the_model():
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY), dtype=torch.bfloat16)
    step = trace_step(TINY, WORK, Candidate("laga", 1, "latent"), H100)
    assert step.parameter_bytes == sum(parameter.nbytes for parameter in model.parameters())  # routers are fp32
    assert step.bytes_when_sharded(4, 2) < step.peak_bytes + 12 * step.parameter_bytes // 2
