"""The training loop over four ranks of the pool: arrangements, resuming, stopping, exporting."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from laga_attn.train.data import Position, open_corpus, stream
from laga_attn.train.errors import UsageError
from laga_attn.train.loop import train
from laga_attn.train.metrics import StepMetrics, read_metrics
from laga_attn.train.model import find_model
from laga_attn.train.options import TrainOptions
from laga_attn.train.setup import examine
from laga_attn.train.stop import StopRequest
from tests.compare import assert_bitwise
from tests.train.micro import SEQ_LEN, micro_options, write_micro


class StopOnRank(StopRequest):
    """Asked to stop on one rank alone, from its `after`-th step on."""

    def __init__(self, asked: bool, after: int) -> None:
        super().__init__()
        self.left = after if asked else 10**6

    def requested(self) -> bool:
        self.left -= 1
        return self.left <= 0


def run(ctx, options: TrainOptions, stop_rank: int = -1, stop_after: int = 0) -> str:
    text = io.StringIO()
    stop = StopOnRank(ctx.rank == stop_rank, stop_after)
    train(examine(options, 4), torch.device("cpu"), stop, Console(file=text, width=200))
    return text.getvalue()


def losses(options: TrainOptions) -> list[float]:
    metrics = read_metrics(options.out / "metrics.jsonl")
    assert [line.step for line in metrics] == list(range(1, len(metrics) + 1))
    return [line.loss for line in metrics]


def last(options: TrainOptions) -> StepMetrics:
    return read_metrics(options.out / "metrics.jsonl")[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("micro")
    write_micro(folder)
    return folder


@pytest.fixture(scope="module")
def reference(ranks, folder) -> TrainOptions:
    """A finished run: two replicas of two ranks, two rows each."""
    options = micro_options(folder, "reference", cp=2, batch_size=2, export=folder / "hf")
    ranks(4).run(run, options)
    return options


def test_the_loss_falls_and_every_step_is_recorded(reference):
    curve = losses(reference)
    assert len(curve) == 6
    assert curve[0] == pytest.approx(5.55, abs=0.05)  # ln 257: a uniform guess
    assert curve[-1] < curve[0] - 0.5
    metrics = last(reference)
    rows = stream(open_corpus(reference.data, reference.seed), SEQ_LEN, Position())
    valid = [SEQ_LEN - (len(row.cu_seqlens) - 1) for row, _ in (next(rows) for _ in range(24))]
    assert metrics.tokens == sum(valid[20:])
    assert metrics.port_bytes > 0
    assert metrics.peak_bytes > 2**20
    assert (reference.out / "loss.png").stat().st_size > 1000
    assert sorted(path.name for path in (reference.out / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize(
    "changes",
    [
        {"cp": 1, "batch_size": 1},
        {"cp": 4, "batch_size": 4, "ulysses_degree": 2},
        {"cp": 4, "batch_size": 4, "scheme": "explicit", "ulysses_degree": 4},
        {"cp": 2, "batch_size": 2, "scheme": "absorbed", "activation_checkpointing": True},
        {"cp": 2, "batch_size": 2, "scheme": "auto", "save": "latent"},
    ],
)
def test_how_ranks_and_schemes_divide_the_work_does_not_change_what_is_learnt(ranks, folder, reference, changes):
    options = micro_options(folder, "-".join(map(str, changes.values())), **changes)
    ranks(4).run(run, options)
    assert losses(options) == pytest.approx(losses(reference), rel=2e-5)
    assert last(options).grad_norm == pytest.approx(last(reference).grad_norm, rel=1e-3)


def test_bf16_autocast_follows_fp32(ranks, folder, reference):
    options = micro_options(folder, "bf16", cp=2, batch_size=2, dtype="bf16")
    ranks(4).run(run, options)
    assert losses(options) == pytest.approx(losses(reference), rel=1e-2)
    assert losses(options) != losses(reference)


def test_a_stop_asked_of_one_rank_saves_on_all_and_resuming_repeats_the_curve_bit_for_bit(ranks, folder, reference):
    options = micro_options(folder, "stopped", cp=2, batch_size=2)
    said = ranks(4).run(run, options, 3, 3)
    assert "stopped after step 3 of 6" in said[0]
    assert len(losses(options)) == 3
    assert (options.out / "checkpoints" / "step-00000003").is_dir()
    said = ranks(4).run(run, micro_options(folder, "stopped", cp=2, batch_size=2, resume=True))
    assert "resuming from" in said[0]
    assert losses(options) == losses(reference)
    assert weights(options.out) == weights(reference.out)


def weights(out: Path) -> bytes:
    """The weights and optimizer state of the last step, as one process reads them."""
    folder = out / "checkpoints" / "step-00000006"
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.distcp")))


def test_a_resumed_run_decays_weights_as_it_is_told_now(ranks, folder, reference):
    ranks(4).run(run, micro_options(folder, "decay", cp=2, batch_size=2), 0, 2)
    options = micro_options(folder, "decay", cp=2, batch_size=2, resume=True, weight_decay=50.0)
    ranks(4).run(run, options)
    assert losses(options)[:3] == losses(reference)[:3]  # of weights that no new step has changed
    assert losses(options)[3:] != losses(reference)[3:]


@pytest.mark.parametrize("changes", [{"cp": 4, "batch_size": 4, "scheme": "explicit"}, {"cp": 1, "batch_size": 1}])
def test_a_run_resumed_on_another_arrangement_continues_the_curve(ranks, folder, reference, changes):
    name = f"moved-{changes['cp']}"
    ranks(4).run(run, micro_options(folder, name, cp=2, batch_size=2), 0, 2)
    options = micro_options(folder, name, resume=True, **changes)
    ranks(4).run(run, options)
    assert losses(options)[:2] == losses(reference)[:2]
    assert losses(options) == pytest.approx(losses(reference), rel=2e-5)


def test_resuming_passes_over_damage_and_drops_the_lines_after_it(ranks, folder, reference):
    options = micro_options(folder, "damaged", cp=2, batch_size=2)
    ranks(4).run(run, options)
    (options.out / "checkpoints" / "step-00000006" / ".metadata").write_bytes(b"")
    said = ranks(4).run(run, micro_options(folder, "damaged", cp=2, batch_size=2, resume=True))
    assert "Warning: skipping checkpoint" in said[0]
    assert "step-00000006" in said[0]
    assert losses(options) == losses(reference)


def test_resuming_a_finished_run_does_nothing(ranks, folder, reference):
    said = ranks(4).run(run, micro_options(folder, "reference", cp=2, batch_size=2, resume=True))
    assert "nothing to train" in said[0]
    assert len(losses(reference)) == 6


def test_other_data_cannot_continue_a_run(ranks, folder, reference):
    options = micro_options(folder, "reference", cp=2, batch_size=2, resume=True, seed=1)
    ranks(4).run_raises(run, options, error=UsageError, match="other data or another --seed")


def test_a_gradient_that_is_not_finite_ends_the_run_on_every_rank(ranks, folder):
    options = micro_options(folder, "diverged", cp=4, lr=1e30, warmup=0, save_every=1)
    ranks(4).run_raises(run, options, error=UsageError, match="gradient of step 2 is not finite")
    assert len(losses(options)) == 1


def test_the_export_is_a_transformers_checkpoint_that_can_be_trained_on(ranks, folder, reference):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    config = json.loads((folder / "hf" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    row, _ = next(stream(open_corpus(reference.data, reference.seed), SEQ_LEN))
    end = row.cu_seqlens[1]
    tokens = torch.from_numpy(row.tokens[:end])[None]
    trained = model(input_ids=tokens, labels=tokens, use_cache=False).loss.item()
    fresh = AutoModelForCausalLM.from_config(find_model(str(folder / "config.json")).config)
    untrained = fresh(input_ids=tokens, labels=tokens, use_cache=False).loss.item()
    assert trained < untrained - 0.5

    options = micro_options(folder, "tuned", model=str(folder / "hf"), cp=4, steps=1, lr=1e-6)
    ranks(4).run(run, options)
    assert losses(options)[0] < losses(reference)[0] - 0.5


def test_exported_weights_are_those_of_the_last_checkpoint(folder, reference):
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(reference.out / "checkpoints" / "step-00000006", folder / "flat.pt")
    saved = torch.load(folder / "flat.pt", weights_only=False)["model"]
    exported = load_file(folder / "hf" / "model.safetensors")
    parameters = {name: value for name, value in saved.items() if name in exported}
    assert len(parameters) > 20
    for name, value in parameters.items():
        assert_bitwise(value, exported[name], name=name)
