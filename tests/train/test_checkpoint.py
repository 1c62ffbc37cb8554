from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

from laga_attn.train import checkpoint
from laga_attn.train.checkpoint import Manifest, find_newest
from laga_attn.train.data import Position
from laga_attn.train.errors import UsageError
from tests.compare import assert_bitwise

POSITION = Position(epoch=1, document=2, token=3)


def make(seed: int = 0, width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    weights, biases = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def write(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, keep: int = 9) -> Path:
    return checkpoint.save(root, model, optimizer, step=step, position=POSITION, corpus="c", keep=keep)


def save_steps(ctx, root, steps, keep=9, width=8):
    model, optimizer = make(width=width)
    done = 0
    for step in steps:
        learn(model, optimizer, range(done, step))
        write(root, model, optimizer, step, keep)
        done = step


def load_and_learn(ctx, folder, until):
    model, optimizer = make(seed=7)
    manifest = Manifest.read(folder)
    checkpoint.load(folder, manifest, model, optimizer)
    learn(model, optimizer, range(manifest.step, until))
    return [p.detach() for p in model.parameters()]


def load_into_another_model(ctx, folder):
    model, optimizer = make(width=9)
    checkpoint.load(folder, Manifest.read(folder), model, optimizer)


def save_differing_replicas(ctx, root):
    write(root, *make(seed=ctx.rank // 3), 1)


def fail_while_writing(ctx, root):
    """Every rank's write fails once the checkpoint of step 4 has been begun, as on a full disk."""

    def full(*args, **kwargs):
        raise OSError("no space left")

    original = state_dict_saver.save
    state_dict_saver.save = full
    try:
        write(root, *make(), 4)
    finally:
        state_dict_saver.save = original


def fail_while_committing(ctx, root):
    original = checkpoint._write_durably

    def killed(path, text):
        original(path, text[: len(text) // 2])
        raise OSError("killed")

    checkpoint._write_durably = killed
    try:
        write(root, *make(), 4)
    finally:
        checkpoint._write_durably = original


def newest(root: Path) -> tuple[str | None, list[str]]:
    warnings: list[str] = []
    found = find_newest(root, warnings.append)
    return found and found[0].name, warnings


def test_a_resumed_optimizer_continues_to_the_last_bit(ranks, tmp_path):
    ranks(4).run(save_steps, tmp_path, [2])
    model, optimizer = make()
    learn(model, optimizer, range(5))
    for weights in ranks(4).run(load_and_learn, tmp_path / "step-00000002", 5):
        for actual, expected in zip(weights, model.parameters(), strict=True):
            assert_bitwise(actual, expected.detach())


def test_the_manifest_says_where_the_run_stands_and_lists_what_was_written_once(ranks, tmp_path):
    ranks(4).run(save_steps, tmp_path, [2], 9, 8192)
    folder = tmp_path / "step-00000002"
    manifest = Manifest.read(folder)
    assert (manifest.step, manifest.position, manifest.corpus) == (2, POSITION, "c")
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    content = 3 * 4 * sum(p.numel() for p in make(width=8192)[0].parameters())  # weights and two moments, fp32
    stored = sum((folder / name).stat().st_size for name in manifest.files)
    assert content < stored < 1.2 * content


def test_only_the_newest_are_kept(ranks, tmp_path):
    ranks(4).run(save_steps, tmp_path, [1, 2, 3, 4], 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("failure", [fail_while_writing, fail_while_committing])
def test_a_write_that_fails_midway_loses_nothing_and_is_cleaned_up_by_the_next(ranks, tmp_path, failure):
    ranks(4).run(save_steps, tmp_path, [2])
    ranks(4).run_raises(failure, tmp_path, error=OSError)
    assert newest(tmp_path) == ("step-00000002", [])
    ranks(4).run(save_steps, tmp_path, [4])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]


def damage_content(folder: Path) -> None:
    file = next(path for path in folder.iterdir() if path.suffix == ".distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def drop_file(folder: Path) -> None:
    (folder / ".metadata").unlink()


def tear_manifest(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text()[:50])


def drop_manifest_field(folder: Path) -> None:
    manifest = folder / "manifest.json"
    fields = json.loads(manifest.read_text())
    del fields["corpus"]
    manifest.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_content, "damaged"),
        (drop_file, ".metadata is missing"),
        (tear_manifest, "manifest.json cannot be read"),
        (drop_manifest_field, "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
    ],
)
def test_damaged_checkpoints_are_passed_over_with_a_warning_and_later_replaced(ranks, tmp_path, damage, reason):
    ranks(4).run(save_steps, tmp_path, [2, 4])
    damage(tmp_path / "step-00000004")
    name, warnings = newest(tmp_path)
    assert name == "step-00000002"
    assert len(warnings) == 1
    assert "step-00000004" in warnings[0]
    assert reason in warnings[0]
    # A run resumed from 2 saves 3 with keep=1: the damaged 4 must not make it delete 3.
    ranks(4).run(save_steps, tmp_path, [3], 1)
    assert newest(tmp_path)[0] == "step-00000003"
    ranks(4).run(save_steps, tmp_path, [4], 1)
    assert newest(tmp_path) == ("step-00000004", [])


def test_without_a_whole_checkpoint_there_is_nothing_to_resume(ranks, tmp_path):
    assert newest(tmp_path) == (None, [])
    ranks(4).run(save_steps, tmp_path, [1])
    shutil.move(tmp_path / "step-00000001", tmp_path / ".unfinished-00000001")
    assert newest(tmp_path) == (None, [])


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(ranks, tmp_path):
    ranks(4).run(save_steps, tmp_path, [1])
    folder = tmp_path / "step-00000001"
    ranks(4).run_raises(load_into_another_model, folder, error=UsageError, match="other parameters")


def test_replicas_that_have_drifted_apart_are_not_saved(ranks, tmp_path):
    ranks(4).run_raises(save_differing_replicas, tmp_path, error=RuntimeError, match="weights of the ranks differ")
    assert list(tmp_path.iterdir()) == []
