"""Start the processes of a run: as one of torchrun's, alone, or with torch's own elastic launcher."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from laga_attn.train.errors import UsageError
from laga_attn.train.options import TrainOptions
from laga_attn.train.setup import examine
from laga_attn.train.stop import StopRequest
from laga_attn.train.worker import run_worker

__all__ = ["launch"]


def launch(options: TrainOptions, nproc: int | None = None, max_restarts: int = 0) -> int:
    """Run the training and return its exit status.

    Args:
        options: what to train.
        nproc: processes to start on this machine; None: one, or none where torchrun has started them.
        max_restarts: how often to start them again from the last checkpoint when one dies.

    Raises:
        UsageError: what can be found wrong before any process is started.
    """
    if "RANK" in os.environ:
        if nproc is not None or max_restarts:
            raise UsageError("torchrun starts the processes here; give it --nproc-per-node and --max-restarts instead")
        return run_worker(options)
    if nproc is not None and nproc < 1:
        raise UsageError(f"--nproc must be at least 1, got {nproc}")
    if max_restarts < 0:
        raise UsageError(f"--max-restarts must be at least 0, got {max_restarts}")
    processes = nproc or 1
    if processes == 1 and not max_restarts:
        return run_worker(options)
    examine(options, processes)
    return _launch_processes(options, processes, max_restarts)


def _launch_processes(options: TrainOptions, nproc: int, max_restarts: int) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Processes that share a machine's cores must not each start a thread per core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    # The workers say themselves what went wrong, in one line each.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="laga-attn-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id="laga-attn",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            # Left to the launcher, SIGINT and SIGTERM would end the workers after a grace period that a long
            # step and its checkpoint may exceed. They end by themselves once they see the stop file.
            signals_to_handle="SIGQUIT",
        )
        stop_file = Path(folder) / "stop"
        with StopRequest(stop_file, creates=True).listening():
            try:
                elastic_launch(config, _start_worker)(options, stop_file)
            except ChildFailedError as error:
                return 2 if any(failure.exitcode == 2 for failure in error.failures.values()) else 1
    return 0


def _start_worker(options: TrainOptions, stop_file: Path) -> None:
    # Returning reports success and waits for the other workers; an exit tells the launcher at once.
    status = run_worker(options, stop_file)
    if status:
        raise SystemExit(status)
