"""`laga-attn train`: its arguments, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer
from typer import Option

from laga_attn.train.errors import UsageError
from laga_attn.train.launch import launch
from laga_attn.train.options import Device, Dtype, Save, Scheme, TrainOptions

__all__ = ["train"]

_DEFAULT = TrainOptions()
_RUN, _SPLIT, _LEARN, _KEEP = "What to train", "How to split the work", "How to learn", "What to keep"


def train(
    model: Annotated[
        str,
        Option(
            help="A preset (tiny, deepseek-v2-lite, ...), a Hugging Face config.json, or a local Hugging Face "
            "checkpoint directory, whose weights are loaded. Any multi-head latent attention model.",
            rich_help_panel=_RUN,
        ),
    ] = _DEFAULT.model,
    data: Annotated[
        list[str] | None,
        Option(
            help="File, folder or quoted glob; repeat it for several. Files are read as bytes. "
            "Default: the source code of Python's standard library.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    steps: Annotated[int, Option(help="Optimizer steps of the whole run.", rich_help_panel=_RUN)] = _DEFAULT.steps,
    seq_len: Annotated[int, Option(help="Tokens per sequence.", rich_help_panel=_RUN)] = _DEFAULT.seq_len,
    batch_size: Annotated[
        int,
        Option(help="Sequences per data-parallel rank and step, one after another.", rich_help_panel=_RUN),
    ] = _DEFAULT.batch_size,
    nproc: Annotated[
        int | None,
        Option(help="Processes to start here. Leave it out under torchrun.", rich_help_panel=_SPLIT),
    ] = None,
    cp: Annotated[
        int | None,
        Option(
            help="Ranks that share a sequence; the rest is data parallelism. Default: all ranks.",
            rich_help_panel=_SPLIT,
        ),
    ] = None,
    ulysses_degree: Annotated[
        int | None,
        Option(
            help="Ranks that exchange heads; divides --cp and the heads. 1 (the default) lets no query travel; with "
            "--scheme auto it is chosen.",
            rich_help_panel=_SPLIT,
        ),
    ] = None,
    scheme: Annotated[
        str,
        Option(
            metavar="laga|explicit|absorbed|auto",
            help="What travels between ranks: the latent (laga), every head's K and V (explicit), the latent with "
            "attention in latent space (absorbed), or what is cheapest (auto).",
            rich_help_panel=_SPLIT,
        ),
    ] = _DEFAULT.scheme,
    save: Annotated[
        str,
        Option(
            metavar="latent|gathered|kv|auto",
            help="What attention keeps for backward: least memory (latent) to least work (kv).",
            rich_help_panel=_SPLIT,
        ),
    ] = _DEFAULT.save,
    activation_checkpointing: Annotated[
        bool,
        Option("--activation-checkpointing", help="Recompute each layer in backward.", rich_help_panel=_SPLIT),
    ] = False,
    device: Annotated[
        str, Option(metavar="auto|cpu|cuda", help="auto takes CUDA if there is any.", rich_help_panel=_SPLIT)
    ] = _DEFAULT.device,
    timeout: Annotated[
        float,
        Option(help="Seconds after which a rank gives up waiting for another.", rich_help_panel=_SPLIT),
    ] = _DEFAULT.timeout,
    max_restarts: Annotated[
        int,
        Option(
            help="With --nproc: how often to start again from the last checkpoint after a rank has died.",
            rich_help_panel=_SPLIT,
        ),
    ] = 0,
    dtype: Annotated[
        str,
        Option(
            metavar="fp32|bf16",
            help="bf16 keeps fp32 weights and computes under autocast.",
            rich_help_panel=_LEARN,
        ),
    ] = _DEFAULT.dtype,
    lr: Annotated[float, Option(help="Peak learning rate.", rich_help_panel=_LEARN)] = _DEFAULT.lr,
    min_lr: Annotated[
        float, Option(help="Learning rate at the end of the cosine.", rich_help_panel=_LEARN)
    ] = _DEFAULT.min_lr,
    warmup: Annotated[int, Option(help="Steps of linear warm-up.", rich_help_panel=_LEARN)] = _DEFAULT.warmup,
    weight_decay: Annotated[
        float, Option(help="AdamW's decay of matrices.", rich_help_panel=_LEARN)
    ] = _DEFAULT.weight_decay,
    clip: Annotated[
        float, Option(help="Largest norm of the whole gradient; 0: no limit.", rich_help_panel=_LEARN)
    ] = _DEFAULT.clip,
    seed: Annotated[int, Option(help="Of random weights and document order.", rich_help_panel=_LEARN)] = _DEFAULT.seed,
    out: Annotated[
        Path | None,
        Option(help="Folder of the run. Default: runs/ and the model's name.", rich_help_panel=_KEEP),
    ] = None,
    save_every: Annotated[int, Option(help="Steps between checkpoints.", rich_help_panel=_KEEP)] = _DEFAULT.save_every,
    keep: Annotated[
        int, Option(help="How many of the newest checkpoints to keep.", rich_help_panel=_KEEP)
    ] = _DEFAULT.keep,
    resume: Annotated[
        bool,
        Option("--resume", help="Continue from the newest whole checkpoint in --out.", rich_help_panel=_KEEP),
    ] = False,
    export: Annotated[
        Path | None,
        Option(help="Folder for a Hugging Face checkpoint at the end.", rich_help_panel=_KEEP),
    ] = None,
) -> None:
    """Train a multi-head latent attention language model with every sequence split over several ranks.

    Two ranks on this machine, on the source of Python's standard library:

        laga-attn train --nproc 2

    Eight GPUs, sequences of 64K tokens shared by four, from a checkpoint on disk:

        torchrun --nproc-per-node 8 -m laga_attn.cli train --model path/to/model --data 'corpus/*.txt'
        --seq-len 65536 --cp 4 --scheme auto --dtype bf16 --activation-checkpointing

    Ctrl-C or SIGTERM finishes the step and saves; --resume goes on, bit for bit on the CPU, and also with
    another --cp or --scheme. metrics.jsonl in the run's folder holds one line per step, loss.png the curve.
    """
    try:
        options = TrainOptions(
            model=model,
            data=tuple(data or ()),
            out=out if out is not None else Path("runs", Path(model).resolve().name.removesuffix(".json")),
            export=export,
            steps=steps,
            seq_len=seq_len,
            batch_size=batch_size,
            cp=cp,
            ulysses_degree=ulysses_degree,
            scheme=cast(Scheme, scheme),
            save=cast(Save, save),
            dtype=cast(Dtype, dtype),
            activation_checkpointing=activation_checkpointing,
            lr=lr,
            min_lr=min_lr,
            warmup=warmup,
            weight_decay=weight_decay,
            clip=clip,
            seed=seed,
            save_every=save_every,
            keep=keep,
            resume=resume,
            timeout=timeout,
            device=cast(Device, device),
        )
        status = launch(options, nproc, max_restarts)
    except UsageError as error:
        typer.echo(f"Error: {error}", err=True)
        status = 2
    raise typer.Exit(status)
