"""One process of `laga-attn generate`: loads the model, continues the prompt, reports what it cost."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from laga_attn.agreement import agree
from laga_attn.grid import ContextParallel
from laga_attn.inference.cache import CacheMemory
from laga_attn.inference.options import GenerateOptions, cache_dtype, check, on_cuda
from laga_attn.inference.text import Text, open_text
from laga_attn.traffic import Traffic, traffic
from laga_attn.train.errors import UsageError

if TYPE_CHECKING:
    from laga_attn.integrations.transformers import GenerationCache

__all__ = ["Report", "generate", "run_worker"]

_OK, _FAILED, _USAGE = 0, 1, 2
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Report:
    """What a run cost. Bytes sent are those of this rank."""

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    prefill_sent: int
    decode_sent: int
    memory: CacheMemory

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        decoded = self.new_tokens - 1  # the first token is prefill's
        yield f"prefill  {self.prompt_tokens} tokens, {_rate(self.prompt_tokens, self.prefill_seconds)}"
        yield f"decode   {decoded} tokens, {_rate(decoded, self.decode_seconds)}"
        each = ", ".join(f"{used / _MIB:.3f}" for used in self.memory.used)
        yield f"cache    {each} MiB per rank, {self.memory.total / _MIB:.3f} MiB in all"
        yield (
            f"wire     {self.prefill_sent / self.prompt_tokens:.0f} bytes sent per prompt token and rank, "
            f"{self.decode_sent / max(1, decoded):.0f} per new token"
        )


def generate(
    options: GenerateOptions, cp: ContextParallel, device: torch.device, show: Callable[[str], None]
) -> Report:
    """Continue the prompt, showing the text as it comes. All ranks call this alike.

    Raises:
        UsageError: a model that cannot be loaded or do what is asked, on all ranks.
    """
    ready, error = None, None
    try:
        ready = _prepare(options, cp, device)
    except UsageError as failure:
        error = str(failure)
    try:
        agree(cp, {}, error)
    except ValueError as failure:
        raise UsageError(str(failure)) from failure
    assert ready is not None
    model, text, tokens, cache = ready
    torch.manual_seed(options.seed)
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature:
        sampling = {"do_sample": True, "temperature": options.temperature}
    with traffic() as ledger:
        stream = _Stream(text.feed, text.end, show, ledger)
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            cache=cache,
            streamer=stream,
            max_new_tokens=options.max_new_tokens,
            prefill_chunk_size=options.prefill_chunk,
            eos_token_id=text.end,
            pad_token_id=0 if text.end is None else text.end,
            **sampling,
        )
    first, last = stream.marks[0], stream.marks[-1]
    return Report(
        prompt_tokens=tokens.shape[1],
        new_tokens=len(stream.marks),
        prefill_seconds=first.seconds,
        decode_seconds=last.seconds - first.seconds,
        prefill_sent=first.sent,
        decode_sent=last.sent - first.sent,
        memory=cache.latents.memory(),
    )


def _prepare(
    options: GenerateOptions, cp: ContextParallel, device: torch.device
) -> tuple[Any, Text, Tensor, GenerationCache]:
    """The model, its text, the prompt's tokens `[1, n]` and an empty cache."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from laga_attn.integrations.transformers import generation_cache, parallelize

    factory: Any = AutoModelForCausalLM
    try:
        model: Any = factory.from_pretrained(options.model, dtype="auto", local_files_only=True).to(device).eval()
    except (OSError, ValueError, RuntimeError, LookupError, SafetensorError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"--model {options.model} cannot be loaded: {lines[0]}") from error
    text = open_text(options.model, model.config.vocab_size)
    tokens = torch.tensor([text.encode(options.prompt)], device=device)
    longest = model.config.max_position_embeddings
    if tokens.shape[1] + options.max_new_tokens > longest:
        raise UsageError(
            f"{tokens.shape[1]} prompt tokens and --max-new-tokens {options.max_new_tokens} exceed the model's "
            f"max_position_embeddings {longest}"
        )
    try:
        parallelize(model, cp=cp)
        return model, text, tokens, generation_cache(model, cp=cp, dtype=cache_dtype(options.cache_dtype))
    except ValueError as error:
        raise UsageError(f"--model {options.model}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Mark:
    """When a token was there: seconds since the start, and bytes sent by then."""

    seconds: float
    sent: int


@dataclass(slots=True)
class _Stream:
    """What `generate()` hands its tokens to: the prompt first, then one at a time."""

    feed: Callable[[int], str]
    end_token: int | None
    show: Callable[[str], None]
    ledger: Traffic
    marks: list[_Mark] = field(default_factory=list)
    started: float | None = None

    def put(self, tokens: Tensor) -> None:
        if self.started is None:
            self.started = time.perf_counter()
            return
        self.marks.append(_Mark(time.perf_counter() - self.started, self.ledger.sent()))
        token = int(tokens)
        if token != self.end_token:
            self.show(self.feed(token))

    def end(self) -> None:
        self.show("\n")


def run_worker(options: GenerateOptions) -> int:
    """Generate as the rank that the environment (`RANK`, `WORLD_SIZE`, ...) says, alone if it says nothing.

    Only rank 0 writes: the text to stdout, what it cost and errors to stderr.

    Returns:
        The exit status: 0 done, 2 something that the user has to change, 1 another error.
    """
    first = int(os.environ.get("RANK", "0")) == 0

    def show(text: str) -> None:
        if first:
            print(text, end="", flush=True)

    try:
        check(options, int(os.environ.get("WORLD_SIZE", "1")))
        _hide_progress_bars()
        with _ranks(options) as (cp, device):
            report = generate(options, cp, device, show)
    except UsageError as error:
        if first:
            print(f"Error: {error}", file=sys.stderr)
        return _USAGE
    except Exception:
        traceback.print_exc()
        return _FAILED
    if first:
        print(*report.lines(), sep="\n", file=sys.stderr)
    return _OK


@contextmanager
def _ranks(options: GenerateOptions) -> Iterator[tuple[ContextParallel, torch.device]]:
    """All processes as one context-parallel group, and the device of this one."""
    device = torch.device("cpu")
    if on_cuda(options):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        yield ContextParallel.none(), device
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    assert dist.group.WORLD is not None
    try:
        yield ContextParallel(dist.group.WORLD), device
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _hide_progress_bars() -> None:
    """Those of Transformers, which would stand between the text."""
    from transformers.utils import logging

    bars: Any = logging
    bars.disable_progress_bar()


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tokens/s" if tokens and seconds else "too few to time"
