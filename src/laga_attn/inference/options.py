"""What a run of `laga-attn generate` is asked to do, checked before any process is started."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from laga_attn.inference.storage import FP8
from laga_attn.train.errors import UsageError

__all__ = ["CacheDtype", "GenerateOptions", "cache_dtype", "check", "on_cuda"]

CacheDtype: TypeAlias = Literal["auto", "fp32", "bf16", "fp16", "fp8"]

_NEEDED = ("transformers", "safetensors")


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One run.

    Attributes:
        model: a local Hugging Face checkpoint directory.
        prompt: the text to continue; may be empty.
        max_new_tokens: tokens to generate at most.
        cp: ranks that share the cache; None: all processes.
        cache_dtype: of storage; `auto`: that of the model.
        temperature: 0 always takes the most likely token.
        seed: of sampling.
        prefill_chunk: tokens of the prompt at a time; None: all at once.
        device: `auto` takes CUDA if there is any.

    Raises:
        UsageError: a value outside its range.
    """

    model: Path
    prompt: str
    max_new_tokens: int = 200
    cp: int | None = None
    cache_dtype: CacheDtype = "auto"
    temperature: float = 0.0
    seed: int = 0
    prefill_chunk: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        for name, value in (("max-new-tokens", self.max_new_tokens), ("prefill-chunk", self.prefill_chunk)):
            if value is not None and value < 1:
                raise UsageError(f"--{name} must be at least 1, got {value}")
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature must be 0 or more, got {self.temperature}")
        for name, chosen, choices in (
            ("cache-dtype", self.cache_dtype, get_args(CacheDtype)),
            ("device", self.device, ("auto", "cpu", "cuda")),
        ):
            if chosen not in choices:
                raise UsageError(f"--{name} must be one of {', '.join(choices)}, got {chosen!r}")


def cache_dtype(name: CacheDtype) -> torch.dtype | None:
    """The dtype that `--cache-dtype` names; None: that of the model.

    Raises:
        UsageError: fp8 where this PyTorch has none.
    """
    if name == "fp8" and FP8 is None:
        raise UsageError("--cache-dtype fp8 needs a PyTorch with float8_e4m3fn")
    dtypes = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8}
    return dtypes[name]


def on_cuda(options: GenerateOptions) -> bool:
    """Whether to compute on CUDA devices, one for each process."""
    return options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())


def check(options: GenerateOptions, processes: int) -> None:
    """Look at everything that can be wrong before a model is loaded.

    Raises:
        UsageError: whatever stands in the way.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"generating needs {', '.join(missing)}; run: pip install 'laga-attn[train]'")
    if options.cp is not None and options.cp != processes:
        raise UsageError(
            f"--cp {options.cp} is not the number of processes, {processes}: all of them share the cache of one text; "
            f"start {options.cp} with --nproc, or leave --cp out"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if on_cuda(options) and here > torch.cuda.device_count():
        raise UsageError(
            f"this machine has {torch.cuda.device_count()} CUDA devices for {here} processes; start one process per "
            "device, or use --device cpu"
        )
    cache_dtype(options.cache_dtype)
    config = _config(options.model)
    if not isinstance(config.get("kv_lora_rank"), int):
        raise UsageError(
            f"--model {options.model} ({config.get('model_type')}) is not a multi-head latent attention model: its "
            "config has no kv_lora_rank"
        )
    if not any(options.model.glob("*.safetensors")):
        raise UsageError(f"--model {options.model} holds no *.safetensors weights")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"--model {folder} is not a Hugging Face checkpoint directory: it has no config.json")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"--model {folder}: {path} is not JSON ({error})") from error
    return config
