"""`laga-attn plan` answers, and refuses in one line what it cannot answer."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from laga_attn.cli import app
from laga_attn.plan.hardware import load_hardware, preset_names

TINY = ("--model", "tiny", "--seq-len", "2K", "--jobs", "1")


def plan(*words):
    return CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "140"})


def refusal(*words):
    """The one line of an error, after the name of the command."""
    result = plan(*words)
    assert result.exit_code == 2, result.output
    (line,) = result.output.splitlines()
    return line.removeprefix("laga-attn plan: ")


def test_a_sweep_has_a_row_for_every_configuration_and_recommends_the_fastest_that_fits(tmp_path):
    words = ("--json", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "plan.png"))
    result = plan(*TINY, "--cp", "2", "--save", "all", *words)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "plan.json").read_text())
    rows = report["rows"]
    wanted = {"explicit": ("kv", "latent"), "absorbed": ("latent", "gathered"), "laga": ("latent", "gathered", "kv")}
    assert [(row["scheme"], row["ulysses_degree"], row["save"]) for row in rows] == [
        (scheme, degree, save) for scheme, saves in wanted.items() for save in saves for degree in (1, 2)
    ]
    best = rows[report["recommended"]]
    assert best["fits"]
    assert best["seconds_without_overlap"] == min(row["seconds_without_overlap"] for row in rows)
    assert report["reason"].startswith(f"{best['scheme']} U={best['ulysses_degree']} save={best['save']}: ")
    assert f"Recommended: {best['scheme']} U={best['ulysses_degree']}" in result.output
    assert 'scheme="auto" takes ' in result.output
    for name, figure in load_hardware("h100").figures().items():  # every constant, and where it is from
        assert f"{name} = {figure.value:g} ({figure.source}, {figure.date})" in " ".join(result.output.split())
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_schemes_degrees_ranks_and_nodes_can_be_chosen():
    words = ("--scheme", "laga", "--scheme", "explicit", "--ulysses-degree", "4", "--ranks", "0,3")
    result = plan(
        *TINY, "--cp", "4", *words, "--tp", "2", "--dp", "2", "--gpus-per-node", "4", "--nodes", "4", "--json", "-"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout[result.stdout.index("{\n") :])
    assert [(row["scheme"], row["ulysses_degree"]) for row in report["rows"]] == [("laga", 4), ("explicit", 4)]
    assert {row["rank"] for row in report["rows"]} <= {0, 3}
    assert all(row["nic_sent"]["forward"] > 0 for row in report["rows"])
    assert any(message["kind"] == "tensor_parallel" for message in report["rows"][0]["messages"])
    assert "cp 4 x tp 2 x dp 2 = 16 devices on 4 nodes" in result.output


def test_fp32_computes_at_half_the_rate_and_sends_twice_the_bytes(tmp_path):
    rows, output = {}, {}
    for dtype in ("bf16", "fp16", "fp32"):
        path = tmp_path / f"{dtype}.json"
        result = plan(*TINY, "--cp", "2", "--scheme", "laga", "--dtype", dtype, "--json", str(path))
        assert result.exit_code == 0, result.output
        rows[dtype], output[dtype] = json.loads(path.read_text())["rows"], " ".join(result.output.split())
    for name in ("seconds_without_overlap", "peak_bytes", "sent"):
        assert [row[name] for row in rows["bf16"]] == [row[name] for row in rows["fp16"]]
    default = {dtype: re.search(r"by default \((\d+)\)", text)[1] for dtype, text in output.items()}
    assert default == {"bf16": "2000", "fp16": "2000", "fp32": "1000"}
    told = {dtype: int(re.search(r"flops_per_port_byte=(\d+)", text)[1]) for dtype, text in output.items()}
    assert told["fp32"] == pytest.approx(told["bf16"] / 2, rel=0.05)  # two digits are shown
    assert f"bf16_tflops = {load_hardware('h100').bf16_tflops.value / 2:g} (" in output["fp32"]
    assert "fp32 as TF32 at half of it" in output["fp32"]


def test_what_does_not_fit_is_said_and_nothing_is_recommended(tmp_path):
    small = tmp_path / "small.yaml"
    small.write_text("base: a100\nmemory_gb: {value: 0.001, source: invented, date: 2026-01}\n")
    result = plan(*TINY, "--cp", "1", "--hardware", str(small), "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["recommended"] is None
    assert not any(row["fits"] for row in report["rows"])
    assert "nothing fits: the least that is needed is" in result.output


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_figures_with_source_and_date(name):
    for key, figure in load_hardware(name).figures().items():
        assert figure.value > 0
        assert len(figure.source) > 10, key
        assert figure.date[:2] == "20"


def test_presets_are_those_that_are_announced():
    assert preset_names() == ("a100", "h100", "h200", "b200", "910b")


V3 = ("--model", "deepseek-v3", "--seq-len", "8K")
REFUSED = {
    "model": (("--model", "deepseek-v9"), "--model deepseek-v9: neither a preset (deepseek-v2, deepseek-v2-lite, "),
    "tokens": (("--seq-len", "8Q"), "--seq-len 8Q: give a number of tokens such as 131072, 128K or 1M"),
    "chunks": ((*V3, "--cp", "3"), "--cp 3 does not divide 8192 tokens into the 2 x 3 chunks of the zigzag layout; "
               "choose --seq-len 8190, or --cp out of 1, "),
    "half a chunk": (("--model", "tiny", "--seq-len", "8196", "--cp", "4"), "--cp 4 does not divide 8196 tokens into "
                     "the 2 x 4 chunks of the zigzag layout; choose --seq-len 8192, or --cp out of 1, 2, 3, 6, 683"),
    "no ranks": ((*V3, "--cp", "0"), "--cp must be at least 1, got 0"),
    "no devices": ((*V3, "--gpus-per-node", "0"), "--gpus-per-node must be at least 1, got 0"),
    "heads over tp": ((*V3, "--tp", "3"), "--tp 3 does not divide the model's 128 heads; choose one of 1, 2, 4, 8, "),
    "tp over nodes": ((*V3, "--tp", "16"), "--tp 16 does not divide the 8 devices of a node, in which tensor-parallel "
                      "ranks live; choose one of 1, 2, 4, 8"),
    "nodes": ((*V3, "--cp", "16", "--nodes", "3"), "cp 16 x tp 1 x dp 1 = 16 ranks fill 2 nodes of 8, not 3; choose "
              "--nodes 2, or sizes whose product is 24"),
    "degree": ((*V3, "--cp", "4", "--ulysses-degree", "3"), "--ulysses-degree 3 must divide 4 ranks and 128 heads; "
               "choose among 1, 2, 4"),
    "scheme": ((*V3, "--scheme", "ring"), "--scheme ring is unknown; choose among explicit, absorbed, laga, all"),
    "save": ((*V3, "--save", "none"), "--save none is unknown; choose among auto, latent, gathered, kv, all"),
    "no such policy": ((*V3, "--scheme", "explicit", "--save", "gathered"),
                       "none of the schemes explicit has a save policy gathered"),
    "dtype": ((*V3, "--dtype", "fp8"), "--dtype fp8 is unknown; choose one of bf16, fp16, fp32"),
    "ranks": ((*V3, "--cp", "4", "--ranks", "4"), "--ranks 4: give first, last, all, or numbers from 0 to 3"),
    "jobs": ((*V3, "--jobs", "-2"), "--jobs must be at least 1 process, got -2"),
    "hardware": ((*V3, "--hardware", "abacus"), "--hardware abacus: neither a preset (a100, h100, h200, b200, 910b) "
                 "nor a YAML file"),
    "folder": ((*V3, "--plot", "nowhere/plan.png"), "nowhere/plan.png: there is no folder nowhere; create it"),
    "paper": (("--paper",), "--paper needs benchmarks/eager_forms.py: run it in the top folder of a checkout"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_that_says_what_would_be_valid(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, message = REFUSED[case]
    assert refusal(*words).startswith(message)


FILES = {
    "title: [1, 2": " line 1, column 13: not valid YAML: expected ',' or ']', but got '<stream end>'; write lines such "
    "as 'memory_gb: {value: 80, source: datasheet, date: 2024-01}'",
    "title: x\nmemory_gb: {value: 80\nbase: h100\n": " line 3, column 5: not valid YAML: ",
    "title: x\n\tmemory_gb: 80\n": " line 2, column 1: not valid YAML: ",
    "- 80\n": ": not a mapping; write lines such as ",
    "memory_gb: 80\n": ": memory_gb needs value, source and date; write lines such as ",
    "memory_gb: {value: -1, source: s, date: d}": ": memory_gb: value must be a positive number, got -1",
    "memory_efficiency: {value: 80, source: s, date: d}": ": memory_efficiency is a fraction of the peak, at most 1",
    "memory: {value: 80, source: s, date: d}": ": unknown figure 'memory'; known are title, base, bf16_tflops",
    "base: v100\n": ": unknown base 'v100'; choose one of a100, h100, h200, b200, 910b",
}


@pytest.mark.parametrize("text", FILES)
def test_a_hardware_file_that_is_wrong_is_named_with_the_line(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(text)
    assert refusal(*V3, "--hardware", "mine.yaml").startswith(f"mine.yaml{FILES[text]}")


def test_a_hardware_file_changes_the_figures_that_it_names_and_no_other(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("title: Ours\nbase: h200\nnic_gbps: {value: 12.5, source: 100 GbE, date: 2026-01}\n")
    mine, base = load_hardware(str(file)), load_hardware("h200")
    assert (mine.title, mine.nic_gbps.value, mine.name) == ("Ours", 12.5, "mine")
    assert mine.figures() | {"nic_gbps": base.nic_gbps} == base.figures()


@pytest.mark.parametrize(("text", "message"), [("[]", "expected a JSON object"), ("{", "Expecting property name")])
def test_a_model_file_that_is_no_configuration_is_refused(text, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(text)
    line = refusal("--model", str(file))
    assert line.startswith(f"--model {file}: ")
    assert message in line
