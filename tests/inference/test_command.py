"""`laga-attn generate`: the text of the untouched model, what it cost, and errors that say what to change."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

from laga_attn.cli import app
from laga_attn.grid import ContextParallel
from laga_attn.inference.generate import generate
from laga_attn.inference.options import GenerateOptions
from laga_attn.inference.storage import FP8
from laga_attn.inference.text import ByteText, TokenizerText, open_text
from laga_attn.train.data import DOCUMENT_START, VOCAB_SIZE
from laga_attn.train.errors import UsageError
from laga_attn.train.model import build, export, find_model
from tests.integrations.generation import tiny_model
from tests.train.micro import micro_options, write_micro

PROMPT = "def main(argv): # ä"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A model over bytes with random weights, written as `train --export` writes one."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    sizes = {"vocab_size": 260, "eos_token_id": 257, "pad_token_id": 258, "bos_token_id": 256}
    tiny_model(dtype=torch.float32, **sizes).save_pretrained(folder)
    return folder


def expected_text(folder: Path, new: int) -> str:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokens = torch.tensor([[DOCUMENT_START, *PROMPT.encode()]])
    out = model.generate(tokens, max_new_tokens=new, eos_token_id=DOCUMENT_START, pad_token_id=0, do_sample=False)
    text = ByteText()
    return "".join(text.feed(int(token)) for token in out[0, tokens.shape[1] :])


def generate_on_rank(ctx, options):
    cp = ContextParallel.none() if ctx.size == 1 else ContextParallel(ctx.group)
    shown: list[str] = []
    report = generate(options, cp, torch.device("cpu"), shown.append)
    return "".join(shown), report


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_text_is_that_of_the_untouched_model(ranks, checkpoint, size):
    options = GenerateOptions(checkpoint, PROMPT, max_new_tokens=20, prefill_chunk=7 if size == 3 else None)
    for text, report in ranks(size).run(generate_on_rank, options):
        assert text == expected_text(checkpoint, 20) + "\n"
        assert report.prompt_tokens == 1 + len(PROMPT.encode())
        assert report.new_tokens == 20
        # 40 tokens without the last, in pages of 64: one page of 2 layers of 20 fp32 numbers per token.
        assert report.memory.used == (64 * 2 * 20 * 4, *[0] * (size - 1))
        assert (report.decode_sent > 0) == (size > 1)
        lines = "\n".join(report.lines())
        assert f"prefill  {report.prompt_tokens} tokens" in lines
        assert "decode   19 tokens" in lines


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", *(["fp8"] if FP8 else [])])
def test_cache_dtypes_change_what_the_cache_takes(ranks, checkpoint, dtype):
    options = GenerateOptions(checkpoint, PROMPT, max_new_tokens=3, cache_dtype=dtype)
    ((_, report),) = ranks(1).run(generate_on_rank, options)
    row = {"bf16": 40, "fp16": 40, "fp32": 80, "fp8": 28}[dtype]
    assert report.memory.total == 64 * 2 * row


def test_sampling_depends_on_the_seed_alone(ranks, checkpoint):
    def text(seed: int, size: int) -> set[str]:
        options = GenerateOptions(checkpoint, PROMPT, max_new_tokens=15, temperature=1.0, seed=seed)
        return {shown for shown, _ in ranks(size).run(generate_on_rank, options)}

    assert text(1, 1) == text(1, 2)
    assert text(1, 1) != text(2, 1)


def test_the_command_streams_text_and_reports_to_stderr(checkpoint, tmp_path):
    """As a user runs it, on two processes."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT)
    command = [
        sys.executable,
        "-m",
        "laga_attn.cli",
        "generate",
        "--model",
        str(checkpoint),
        "--prompt-file",
        str(prompt),
    ]
    run = subprocess.run(
        [*command, "--cp", "2", "--max-new-tokens", "12", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == expected_text(checkpoint, 12) + "\n"
    for part in ("prefill", "decode", "MiB per rank", "bytes sent per prompt token"):
        assert run.stderr.count(part) == 1, run.stderr  # rank 0 alone reports


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["generate", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "{}"], "either --prompt or --prompt-file"),
        (["--model", "{}", "--prompt", "a", "--prompt-file", "b"], "either --prompt or --prompt-file"),
        (["--model", "{}", "--prompt-file", "/nowhere"], "--prompt-file /nowhere cannot be read"),
        (["--model", "/nowhere", "--prompt", "a"], "not a Hugging Face checkpoint directory"),
        (["--model", "{}", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--model", "{}", "--prompt", "a", "--max-new-tokens", "999"], "max_position_embeddings 256"),
        (["--model", "{}", "--prompt", "a", "--cache-dtype", "int3"], "--cache-dtype must be one of"),
        (["--model", "{}", "--prompt", "a", "--temperature", "-1"], "--temperature must be 0 or more"),
        (["--model", "{}", "--prompt", "a", "--nproc", "0"], "must be at least 1"),
        (["--model", "{}", "--prompt", "a", "--nproc", "2", "--cp", "4"], "--cp 4 is not the number of processes, 2"),
        (["--model", "{}", "--prompt", "a", "--device", "tpu"], "--device must be one of"),
    ],
)
def test_usage_errors_say_what_to_change(checkpoint, arguments, message):
    result = invoke(*(argument.format(checkpoint) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_checkpoint_that_train_exports_can_write(tmp_path):
    write_micro(tmp_path / "micro")
    options = micro_options(tmp_path / "micro", "run")
    export(build(find_model(options.model), options, device="cpu"), tmp_path / "model")
    result = invoke("--model", str(tmp_path / "model"), "--prompt", "latent", "--max-new-tokens", "4")
    assert result.exit_code == 0, result.output
    assert "decode   3 tokens" in result.stderr
    assert result.stdout.endswith("\n")


def load_elsewhere_on_rank_1(ctx, options, other):
    generate_on_rank(ctx, other if ctx.rank == 1 else options)


def test_weights_that_cannot_be_loaded_are_one_line_on_all_ranks(ranks, checkpoint, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:1000])
    result = invoke("--model", str(tmp_path), "--prompt", "a")
    assert result.exit_code == 2
    assert re.fullmatch(r"Error: --model \S+ cannot be loaded: .*\n", result.stderr)
    options = [GenerateOptions(folder, "a", max_new_tokens=2) for folder in (checkpoint, tmp_path)]
    ranks(2).run_raises(load_elsewhere_on_rank_1, *options, error=UsageError, match="rank 1: .*cannot be loaded")


def test_more_processes_than_devices_are_refused_before_any_starts(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = invoke("--model", str(checkpoint), "--prompt", "a", "--device", "cuda", "--cp", "2")
    assert result.exit_code == 2
    assert "1 CUDA devices for 2 processes" in result.output


def test_models_that_cannot_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    assert "not a multi-head latent attention model" in invoke("--model", str(tmp_path), "--prompt", "a").output
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in invoke("--model", str(tmp_path), "--prompt", "a").output
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "kv_lora_rank": 8}))
    assert "no *.safetensors weights" in invoke("--model", str(tmp_path), "--prompt", "a").output


def test_bytes_are_held_back_until_a_character_is_whole():
    text = ByteText()
    assert text.encode("ä") == [DOCUMENT_START, 0xC3, 0xA4]
    assert [text.feed(token) for token in (0x61, 0xC3, 0xA4, 0xFF, DOCUMENT_START)] == ["a", "", "ä", "\ufffd", ""]


class Words:
    """A tokenizer whose token 3 is half a character."""

    eos_token_id, bos_token_id = 2, None

    def __call__(self, text):
        return type("Encoding", (), {"input_ids": [len(word) for word in text.split()]})

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return "".join({1: "one ", 3: "\ufffd", 4: "four\n"}[token] for token in tokens).replace("\ufffd\ufffd", "ö")


def test_a_tokenizer_streams_whole_characters():
    text = TokenizerText(Words())
    assert text.end == 2
    assert text.encode("a bcd") == [1, 3]
    assert [text.feed(token) for token in (1, 3, 3, 4, 1)] == ["one ", "", "ö", "four\n", "one "]
    with pytest.raises(UsageError, match="empty --prompt"):
        text.encode("")


def test_a_model_without_tokenizer_needs_token_ids_for_bytes(tmp_path):
    assert isinstance(open_text(tmp_path, VOCAB_SIZE), ByteText)
    with pytest.raises(UsageError, match="too few for bytes"):
        open_text(tmp_path, 200)
