"""`laga-attn bench` as a user runs it: one tiny cell end to end, and a line for every mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from laga_attn.bench import command
from laga_attn.bench.report import FORMAT
from laga_attn.cli import app

CELL = ["--ranks", "2", "--seq-len", "64", "--heads", "2", "--dtype", "bf16"]
VARIANTS = ["--scheme", "laga", "--save", "latent", "--ulysses-degree", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[str, dict[str, Any], str]:
    """What the terminal shows, the JSON and the HTML."""
    folder: Path = tmp_path_factory.mktemp("bench")
    files = ["--json", str(folder / "a.json"), "--html", str(folder / "a.html")]
    words = [*CELL, *VARIANTS, "--rounds", "2", "--overlap", *files]
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 0, result.output
    return result.output, json.loads((folder / "a.json").read_text()), (folder / "a.html").read_text()


def test_the_json_holds_every_measurement_under_its_documented_name(run):
    _, data, _ = run
    assert data["format"] == FORMAT
    assert {"torch", "processor", "cores", "load at start"} <= set(data["environment"])
    assert data["options"]["rounds"] == 2
    (cell,) = data["cells"]
    assert cell["cell"] == {"ranks": 2, "seq_len": 64, "num_heads": 2, "dtype": "bf16"}
    assert cell["link"] is None
    assert cell["baseline"] == "explicit U=2 kv"
    assert [v["name"] for v in cell["variants"]] == ["explicit U=2 kv", "laga U=2 latent"]
    for variant in cell["variants"]:
        assert len(variant["seconds"]) == 2
        assert all(0 < s < 60 for s in variant["seconds"])
        assert set(variant["ratio"]) == {"low", "median", "high"}
        assert variant["gemm_fraction"] > 0
        assert variant["sent_across"] is None
        assert variant["overlap"]["exchanges_seconds"] > 0
        assert set(variant["overlap"]["hidden"]) == {"low", "median", "high"}
        assert (variant["resident"] is not None) == (sys.platform == "linux")


def test_bytes_and_memory_are_those_of_the_design(run):
    """32 tokens a rank, 2 heads, bf16. Beside the gradient of the output travels delta, in fp32, per head and token."""
    _, data, _ = run
    explicit, laga = data["cells"][0]["variants"]
    exchanged, delta = 32 * 2 * (192 + 128) // 2, 32 * 2 * 4 // 2  # to the other rank: half
    assert explicit["sent_forward"] == 2 * (2 * exchanged)
    assert explicit["sent_backward"] == 2 * (2 * exchanged) + delta
    assert laga["sent_forward"] == 2 * (exchanged + 32 * 576)
    assert laga["sent_backward"] == 2 * (exchanged + 2 * 32 * 576) + delta  # gathered again
    # Queries of one head over 64 tokens, two heads' outputs over 32, K and V or the latents, and an fp32 LSE.
    own, lse = 64 * 192 + 32 * 2 * 128, 64 * 4
    assert laga["saved"] == 2 * (own + 32 * 576) + lse
    assert explicit["saved"] == 2 * (own + 32 * 576 + 64 * 320) + lse
    for variant in (explicit, laga):
        assert variant["saved"] < variant["peak"] < 2**24


def test_terminal_and_html_show_every_variant(run):
    output, _, html = run
    lines = output.splitlines()
    assert lines[0].startswith("P=2 S=64 H=2 bf16; GEMM peak ")
    rows = [line.split() for line in lines if line.strip().startswith(("explicit U=2 kv", "laga U=2 latent"))]
    assert len(rows) == 2
    assert rows[0][3] == "1.00"
    assert "…" not in output  # nothing is cut off
    assert "2 ranks, 64 tokens, 2 heads, bf16" in html


def mistakes(folder: Path) -> dict[str, tuple[list[str], str]]:
    return {
        "preset": (["--preset", "fast"], "--preset 'fast' is unknown; choose one of quick, full, paper"),
        "scheme": (["--scheme", "ring"], "--scheme ring is not possible; choose among explicit, absorbed, laga, auto"),
        "degree": (["--ulysses-degree", "3"], "--ulysses-degree 3: none divides 2 ranks and 16 heads"),
        "kernel": (["--kernel", "fast"], "--kernel: unknown kernel 'fast': choose one of auto, "),
        "kernel dims": (["--kernel", "sdpa"], "head dims 192/128: it needs qk_head_dim == v_head_dim"),
        "device": (["--device", "tpu"], "--device 'tpu' is unknown; choose one of cpu, cuda"),
        "link": (["--link", "fast"], "--link 'fast' is not RATE[,LATENCY]"),
        "link on cuda": (["--link", "1gbit", "--device", "cuda"], "leave --device cuda out"),
        "odd": (["--link", "1gbit", "--ranks", "3"], "--link needs an even number of ranks"),
        "json": (["--json", f"{folder}/none/a.json"], "none/a.json cannot be written; name a file in a folder that"),
        "html": (["--html", str(folder)], "cannot be written"),
    }


@pytest.mark.parametrize("name", mistakes(Path("FOLDER")))
def test_a_mistake_is_one_line_with_status_2_and_starts_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "run_on_ranks", lambda *_, **__: pytest.fail("started"))
    words, message = mistakes(tmp_path)[name]
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_without_a_gpu_for_every_rank_cuda_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(command, "run_on_ranks", lambda *_, **__: pytest.fail("started"))
    result = CliRunner().invoke(app, ["bench", "--device", "cuda", "--ranks", "4"])
    assert result.exit_code == 2
    assert "4 ranks need as many GPUs, and there are 1" in result.stderr


def test_help_teaches_with_examples():
    wide = {"COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"}
    text = CliRunner().invoke(app, ["bench", "--help"], env=wide).output
    for words in ("--preset", "--link", "--overlap", "quick|full|paper", "RATE[,LATENCY]", "laga-attn bench --html"):
        assert words in text
