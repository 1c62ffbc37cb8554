"""The training loop of one rank."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from laga_attn.gradients import reduce_gradients
from laga_attn.grid import ContextParallel
from laga_attn.integrations.transformers import ParallelizedModel, parallelize
from laga_attn.traffic import traffic
from laga_attn.train import checkpoint
from laga_attn.train.data import Position, Row, stream
from laga_attn.train.errors import UsageError
from laga_attn.train.loss import shard_row, token_loss_sum
from laga_attn.train.metrics import MetricsLog, Screen, StepMetrics, draw_loss, read_metrics
from laga_attn.train.model import build, export, optimizer_groups
from laga_attn.train.options import Ranks, learning_rate
from laga_attn.train.setup import Run, checkpoints
from laga_attn.train.stop import StopRequest
from laga_attn.train.together import everywhere, on_first_rank, reduce

__all__ = ["train"]


@dataclass(frozen=True, slots=True)
class _Worker:
    """What stays the same from step to step on one rank."""

    run: Run
    rank: int
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer


def train(run: Run, device: torch.device, stop: StopRequest, console: Console) -> None:
    """Train until the last step or a request to stop; either way the last step done is in a checkpoint.

    All ranks of the default process group call this with equal arguments.

    Raises:
        UsageError: the run cannot be resumed, the model cannot be parallelised, or the gradient is not finite.
            Raised on every rank.
    """
    options, rank = run.options, dist.get_rank()
    model = build(run.model, options, device)
    handle = everywhere(lambda: _parallelize(model, run))
    groups = optimizer_groups(model, options.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    worker = _Worker(run, rank, device, model, optimizer)
    decay = [group["weight_decay"] for group in optimizer.param_groups]
    step, position = _resume(worker, console)
    for group, value in zip(optimizer.param_groups, decay, strict=True):
        group["weight_decay"] = value  # a checkpoint brings its own
    if step >= options.steps and rank == 0:
        console.print(f"{options.out} is already at step {step} of {options.steps}; nothing to train")

    log_path = options.out / "metrics.jsonl"
    with ExitStack() as stack:
        log = stack.enter_context(MetricsLog(log_path, step)) if rank == 0 else None
        screen = stack.enter_context(Screen(console, step, options.steps, visible=rank == 0))
        rows = stream(run.corpus, options.seq_len, position)
        stopping = False
        while step < options.steps and not stopping:
            mine, position = _next_rows(rows, run.ranks, rank, options.batch_size)
            metrics, stopping = _step(worker, step, mine, stop)
            step = metrics.step
            if log is not None:
                log.write(metrics)
            screen.show(metrics)
            if stopping or step == options.steps or step % options.save_every == 0:
                checkpoint.save(
                    checkpoints(options.out),
                    model,
                    optimizer,
                    step=step,
                    position=position,
                    corpus=run.corpus.fingerprint,
                    keep=options.keep,
                )

    def finish() -> None:
        draw_loss(read_metrics(log_path), log_path.with_name("loss.png"))
        if step < options.steps:
            console.print(f"stopped after step {step} of {options.steps}; continue {options.out} with --resume")
        elif options.export is not None:
            handle.undo()
            export(model, options.export)
            console.print(f"exported to {options.export}")

    on_first_rank(finish)


def _parallelize(model: nn.Module, run: Run) -> ParallelizedModel:
    options = run.options
    cp = ContextParallel(_context_group(run), options.ulysses_degree)
    try:
        return parallelize(model, cp=cp, scheme=options.scheme, save=options.save)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _context_group(run: Run) -> dist.ProcessGroup:
    """The ranks that share this rank's sequences. Every rank takes part in making every group."""
    ranks = run.ranks
    size = ranks.context_parallel
    timeout = timedelta(seconds=run.options.timeout)
    groups: list[dist.ProcessGroup] = [
        dist.new_group(list(range(first, first + size)), timeout=timeout) for first in range(0, ranks.world, size)
    ]
    return groups[ranks.place(dist.get_rank())[0]]


def _resume(worker: _Worker, console: Console) -> tuple[int, Position]:
    """Load the newest whole checkpoint if there is one; `(steps done, where the data stands)`."""
    run = worker.run
    root = checkpoints(run.options.out)
    found = on_first_rank(lambda: checkpoint.find_newest(root, lambda text: console.print(f"Warning: {text}")))
    if found is None:
        if run.options.resume:
            raise UsageError(f"--resume: no checkpoint in {root} is whole; start again in another --out")
        on_first_rank(lambda: run.options.out.mkdir(parents=True, exist_ok=True))
        return 0, Position()
    folder, manifest = found
    if manifest.corpus != run.corpus.fingerprint:
        raise UsageError(
            f"checkpoint {folder} was made with other data or another --seed; resume with those that began the "
            "run, or start a new run from an exported model"
        )
    checkpoint.load(folder, manifest, worker.model, worker.optimizer)
    if worker.rank == 0:
        console.print(f"resuming from {folder}")
    return manifest.step, manifest.position


def _next_rows(
    rows: Iterator[tuple[Row, Position]], ranks: Ranks, rank: int, batch_size: int
) -> tuple[list[Row], Position]:
    """This rank's rows of the next step, and where the stream stands after the rows of all ranks.

    Every rank reads the whole stream, so what a step sees does not depend on how the ranks are arranged.
    """
    step_rows = list(islice(rows, ranks.data_parallel * batch_size))
    first = ranks.place(rank)[0] * batch_size
    return [row for row, _ in step_rows[first : first + batch_size]], step_rows[-1][1]


def _step(worker: _Worker, done: int, rows: list[Row], stop: StopRequest) -> tuple[StepMetrics, bool]:
    """One optimizer step, and whether any rank has been asked to stop."""
    started = time.perf_counter()
    options, device = worker.run.options, worker.device
    with traffic() as ledger:
        loss, tokens = _backward(worker, rows)
    parameters = [parameter for parameter in worker.model.parameters() if parameter.requires_grad]
    reduce_gradients(parameters, dist.group.WORLD)
    norm = float(nn.utils.clip_grad_norm_(parameters, options.clip or math.inf))
    if not math.isfinite(norm):
        raise UsageError(
            f"the gradient of step {done + 1} is not finite (loss {loss}); go back to a checkpoint with --resume and "
            "a lower --lr"
        )
    lr = learning_rate(options, done)
    for group in worker.optimizer.param_groups:
        group["lr"] = lr
    worker.optimizer.step()
    worker.optimizer.zero_grad(set_to_none=True)

    largest = [float(stop.requested()), ledger.sent(), _peak_bytes(device)]
    stopping, port_bytes, peak_bytes = reduce(largest, dist.ReduceOp.MAX, device)
    seconds = time.perf_counter() - started
    metrics = StepMetrics(
        step=done + 1,
        loss=loss,
        tokens=tokens,
        lr=lr,
        grad_norm=norm,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        port_bytes=int(port_bytes),
        peak_bytes=int(peak_bytes),
    )
    return metrics, bool(stopping)


def _backward(worker: _Worker, rows: list[Row]) -> tuple[float, int]:
    """Add up the gradients of this rank's rows; mean loss and number of tokens over all ranks."""
    options, device = worker.run.options, worker.device
    cp_size = worker.run.ranks.context_parallel
    shards = [shard_row(row, cp_size, worker.rank % cp_size, device) for row in rows]
    valid = sum(int(shard.loss_mask.sum()) for _, shard in shards)
    tokens = int(reduce([valid], dist.ReduceOp.SUM, device)[0])
    loss_sum = 0.0
    for layout, shard in shards:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = token_loss_sum(worker.model, layout, shard)
        # Divided by the tokens of all ranks and all rows: gradients then only need to be summed.
        torch.autograd.backward(loss / max(1, tokens))
        loss_sum += loss.item()
    return reduce([loss_sum], dist.ReduceOp.SUM, device)[0] / max(1, tokens), tokens


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
