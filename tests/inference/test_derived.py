"""Values derived from weights are kept while the weights stay and renewed when they change."""

from __future__ import annotations

import pytest
import torch

from laga_attn.inference import LatentCache, attend
from laga_attn.inference.derived import Derived
from tests.compare import assert_close
from tests.oracle import Case, make_inputs, oracle


class Counting:
    """How often a cast of a weight is computed."""

    def __init__(self) -> None:
        self.derived: Derived[torch.Tensor] = Derived()
        self.count = 0

    def cast(self, weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        def compute() -> torch.Tensor:
            self.count += 1
            return weight.detach().to(dtype)

        return self.derived.get((weight,), dtype, compute)


def step_with(optimizer, parameter):
    parameter.grad = torch.ones_like(parameter)
    optimizer([parameter], lr=0.1).step()


def replace_data(parameter):
    parameter.data = parameter.data + 1


CHANGES = {
    "SGD": lambda p: step_with(torch.optim.SGD, p),
    "AdamW": lambda p: step_with(torch.optim.AdamW, p),
    "copy_": lambda p: p.copy_(torch.zeros_like(p)),
    "load_state_dict": lambda p: torch.nn.ParameterList([p]).load_state_dict({"0": torch.zeros_like(p)}),
    "new storage": replace_data,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_seen(change):
    parameter, counting = torch.nn.Parameter(torch.randn(4, 3)), Counting()
    for _ in range(3):
        assert torch.equal(counting.cast(parameter), parameter.bfloat16())
    assert counting.count == 1
    with torch.no_grad():
        CHANGES[change](parameter)
    assert torch.equal(counting.cast(parameter), parameter.bfloat16())
    assert counting.count == 2


def test_another_weight_or_dtype_is_another_value():
    first, counting = torch.randn(4, 3), Counting()
    counting.cast(first)
    assert torch.equal(counting.cast(first + 1), (first + 1).bfloat16())
    assert counting.cast(first, torch.float16).dtype == torch.float16
    assert counting.count == 3


def test_writing_through_data_is_not_seen_until_forget():
    parameter, counting = torch.nn.Parameter(torch.randn(4, 3)), Counting()
    before = counting.cast(parameter).clone()
    parameter.data.mul_(2)
    assert torch.equal(counting.cast(parameter), before)
    counting.derived.forget()
    assert torch.equal(counting.cast(parameter), parameter.bfloat16())


def test_inference_tensors_have_no_versions_and_work():
    with torch.inference_mode():
        weight, counting = torch.randn(4, 3), Counting()
        counting.cast(weight)
        counting.cast(weight)
    assert counting.count == 1


@pytest.mark.parametrize("weight_dtype", [torch.float64, torch.float32])
def test_decode_uses_the_weights_of_now(weight_dtype):
    """In the dtype of the queries the weight is used where it lies; else its cast follows it."""
    case = Case(lengths=(9,), scale=0.4)
    inputs = make_inputs(case)
    weight = torch.nn.Parameter(inputs.weight.to(weight_dtype))
    cache = LatentCache(1, case.rank, case.rope, dtype=torch.float64, page_size=2)
    sequence = cache.add()
    for start, stop in ((0, 6), (6, 7), (7, 9)):
        step = cache.plan({sequence: stop - start}, rebuild_from=4)
        part = (t[:, start:stop] for t in (inputs.q, inputs.c_kv, inputs.k_rope))
        out = attend(
            *part, weight, cache=cache, step=step, layer=0, qk_nope_head_dim=case.nope, v_head_dim=case.v,
            softmax_scale=case.scale,
        )  # fmt: skip
        cache.commit(step)
        now = type(inputs)(**{**vars(inputs), "weight": weight.detach().double()})
        assert_close(out[0], oracle(case, now).out[0, start:stop], rel=1e-12)
        with torch.no_grad():
            weight.mul_(1.5)


def test_attend_under_autocast_computes_in_its_dtype():
    case = Case(lengths=(5,))
    inputs = make_inputs(case)
    cache = LatentCache(1, case.rank, case.rope, dtype=torch.bfloat16)
    step = cache.plan({cache.add(): 5}, rebuild_from=9)
    floats = [t.float() for t in (inputs.q, inputs.c_kv, inputs.k_rope, inputs.weight)]
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*floats, cache=cache, step=step, layer=0, qk_nope_head_dim=case.nope, v_head_dim=case.v)
    assert out.dtype == torch.bfloat16
    assert_close(out[0].float(), oracle(case, inputs).out[0].float(), rel=0.05)
