from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laga_attn.train.errors import UsageError
from laga_attn.train.options import TrainOptions, arrange, learning_rate


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"seq_len": 1}, "--seq-len must be at least 2"),
        ({"batch_size": 0}, "--batch-size"),
        ({"cp": 0}, "--cp"),
        ({"ulysses_degree": 0}, "--ulysses-degree"),
        ({"lr": 0.0}, "--lr must be above 0"),
        ({"lr": math.nan}, "--lr"),
        ({"clip": -1.0}, "--clip"),
        ({"timeout": 0.0}, "--timeout"),
        ({"keep": 0}, "--keep"),
        ({"scheme": "ring"}, "--scheme must be one of laga, explicit, absorbed, auto, got 'ring'"),
        ({"save": "all"}, "--save must be one of latent, gathered, kv, auto"),
        ({"scheme": "explicit", "save": "gathered"}, "--save gathered .* explicit; choose one of auto, kv, latent"),
        ({"scheme": "auto", "save": "kv"}, "--save kv is not possible with --scheme auto; choose one of auto, latent"),
        ({"dtype": "fp16"}, "--dtype must be one of"),
        ({"device": "tpu"}, "--device must be one of"),
    ],
)
def test_values_outside_their_range_are_refused_by_name(wrong, message):
    with pytest.raises(UsageError, match=message):
        TrainOptions(**wrong)


def test_consecutive_ranks_share_a_sequence():
    ranks = arrange(TrainOptions(cp=2), 6)
    assert (ranks.data_parallel, ranks.context_parallel, ranks.world) == (3, 2, 6)
    assert [ranks.place(rank) for rank in range(6)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert arrange(TrainOptions(), 6).context_parallel == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TrainOptions(cp=3), r"--cp 3 does not divide the 4 processes; choose one of \[1, 2, 4\]"),
        (TrainOptions(ulysses_degree=3), r"--ulysses-degree 3 does not divide the 4 .* choose one of \[1, 2, 4\]"),
        (TrainOptions(cp=2, ulysses_degree=4), "--ulysses-degree 4 does not divide the 2"),
        (TrainOptions(seq_len=7), "--seq-len 7 is too short for 4 .* at least 8"),
    ],
)
def test_work_that_cannot_be_divided_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        arrange(options, 4)
    assert arrange(replace(options, cp=1, ulysses_degree=None), 4).data_parallel == 4


@given(
    steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    lr=st.floats(1e-6, 1.0),
    min_lr=st.floats(0.0, 1.0),
)
def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_floor(steps, warmup, lr, min_lr):
    options = TrainOptions(steps=steps, warmup=warmup, lr=lr, min_lr=min_lr)
    rates = [learning_rate(options, step) for step in range(steps + 1)]
    assert all(0 < rate <= lr * (1 + 1e-12) for rate in rates[:-1])
    rising, falling = rates[: min(warmup, steps)], rates[warmup:]
    assert all(a <= b for a, b in pairwise(rising))
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(falling))
    if warmup < steps:
        assert rates[warmup] == pytest.approx(lr)
        assert rates[steps] == pytest.approx(min(lr, min_lr))
