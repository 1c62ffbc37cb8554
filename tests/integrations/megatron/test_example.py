"""The example runs, and its schemes give one loss curve with different traffic."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.integrations.megatron.world import Parallel, megatron_ranks

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "megatron_mla.py"


def run(ctx, scheme: str) -> tuple[list[float], str]:
    spec = importlib.util.spec_from_file_location("megatron_mla", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    text = str(EXAMPLE.parents[1] / "LICENSE")
    arguments = ["--tp", "2", "--cp", "2", "--steps", "4", "--seq-len", "64", "--text", text, "--scheme", scheme]
    options = example.parse(arguments)
    with megatron_ranks(Parallel(tp=2, cp=2)):
        return example.train(options)


def test_all_schemes_learn_alike(ranks):
    losses, tables = {}, {}
    for scheme in ("laga", "explicit", "absorbed"):
        results = ranks(4).run(run, scheme)
        assert all(result[0] == results[0][0] for result in results), "ranks disagree on the loss"
        losses[scheme], tables[scheme] = results[0]
    assert losses["laga"][-1] < losses["laga"][0] - 0.5
    for scheme in ("explicit", "absorbed"):
        assert losses[scheme] == pytest.approx(losses["laga"], rel=1e-4)
    assert "key_value" in tables["explicit"]
    assert "latent" not in tables["explicit"]
    for scheme in ("laga", "absorbed"):
        assert "latent" in tables[scheme]
        assert "key_value" not in tables[scheme]
