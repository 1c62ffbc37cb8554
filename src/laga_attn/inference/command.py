"""`laga-attn generate`: its arguments, what they mean, and the processes that it starts."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from typer import Option

from laga_attn.inference.generate import run_worker
from laga_attn.inference.options import CacheDtype, GenerateOptions, check
from laga_attn.train.errors import UsageError

__all__ = ["generate"]

_TEXT, _SPLIT, _TAKE = "What to write", "How to split the work", "How to choose"


def generate(
    model: Annotated[
        Path,
        Option(
            help="A local Hugging Face checkpoint directory of a multi-head latent attention model, such as `laga-attn "
            "train --export` writes. Without a tokenizer in it, a token is a byte.",
            rich_help_panel=_TEXT,
        ),
    ],
    prompt: Annotated[str | None, Option(help="The text to continue.", rich_help_panel=_TEXT)] = None,
    prompt_file: Annotated[Path | None, Option(help="A file with the text to continue.", rich_help_panel=_TEXT)] = None,
    max_new_tokens: Annotated[int, Option(help="Tokens to write at most.", rich_help_panel=_TEXT)] = 200,
    nproc: Annotated[
        int | None,
        Option(help="Processes to start here. Default: --cp. Leave it out under torchrun.", rich_help_panel=_SPLIT),
    ] = None,
    cp: Annotated[
        int | None,
        Option(help="Ranks that share the cache. Default: all processes.", rich_help_panel=_SPLIT),
    ] = None,
    cache_dtype: Annotated[
        str,
        Option(
            metavar="auto|fp32|bf16|fp16|fp8",
            help="What latents are stored in; auto: the dtype of the model.",
            rich_help_panel=_SPLIT,
        ),
    ] = "auto",
    prefill_chunk: Annotated[
        int | None,
        Option(help="Tokens of the prompt at a time; default: all.", rich_help_panel=_SPLIT),
    ] = None,
    device: Annotated[
        str, Option(metavar="auto|cpu|cuda", help="auto takes CUDA if there is any.", rich_help_panel=_SPLIT)
    ] = "auto",
    temperature: Annotated[
        float, Option(help="0 always takes the most likely token; 1 samples as the model says.", rich_help_panel=_TAKE)
    ] = 0.0,
    seed: Annotated[int, Option(help="Of sampling.", rich_help_panel=_TAKE)] = 0,
) -> None:
    """Continue a text with a multi-head latent attention model whose cache is spread over several ranks.

    What `laga-attn train --export my-model` has learned, on two ranks:

        laga-attn generate --model my-model --prompt 'def main(' --cp 2

    A long prompt on eight GPUs, its latents in eight bits, 8192 tokens at a time:

        laga-attn generate --model path/to/model --prompt-file book.txt --cp 8 --cache-dtype fp8 --prefill-chunk 8192

    Long prompts are split over the ranks (LAGA); each new token is computed on all of them and attends to the part of
    the cache that each one holds. The text goes to stdout, what it cost to stderr.
    """
    try:
        options = GenerateOptions(
            model=model,
            prompt=_prompt(prompt, prompt_file),
            max_new_tokens=max_new_tokens,
            cp=cp,
            cache_dtype=cast(CacheDtype, cache_dtype),
            temperature=temperature,
            seed=seed,
            prefill_chunk=prefill_chunk,
            device=cast(Literal["auto", "cpu", "cuda"], device),
        )
        status = _run(options, nproc)
    except UsageError as error:
        typer.echo(f"Error: {error}", err=True)
        status = 2
    raise typer.Exit(status)


def _prompt(prompt: str | None, path: Path | None) -> str:
    if (prompt is None) == (path is None):
        raise UsageError("give either --prompt or --prompt-file")
    if path is None:
        return prompt or ""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file {path} cannot be read as text ({error})") from error


def _run(options: GenerateOptions, nproc: int | None) -> int:
    if "RANK" in os.environ:
        if nproc is not None:
            raise UsageError("torchrun starts the processes here; give it --nproc-per-node instead of --nproc")
        return run_worker(options)
    processes = options.cp or 1 if nproc is None else nproc
    if processes < 1:
        raise UsageError(f"--nproc and --cp must be at least 1, got {processes}")
    check(options, processes)
    return run_worker(options) if processes == 1 else _start(options, processes)


def _start(options: GenerateOptions, processes: int) -> int:
    """Run in several processes of torch's elastic launcher."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Processes that share a machine's cores must not each start a thread per core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the workers say what went wrong
    with tempfile.TemporaryDirectory(prefix="laga-attn-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id="laga-attn",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, _work)(options)
        except ChildFailedError as error:
            return 2 if any(failure.exitcode == 2 for failure in error.failures.values()) else 1
    return 0


def _work(options: GenerateOptions) -> None:
    if status := run_worker(options):
        raise SystemExit(status)
