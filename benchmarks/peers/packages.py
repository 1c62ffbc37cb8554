"""Peers from PyPI: installed into a folder of their own, so that the environment and its torch stay as they are."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["FOLDER", "install"]

FOLDER: Final = Path(__file__).parents[2] / "build" / "peers"
_WANTED: Final = {"transformers": ["transformers>=5.24"], "yunchang": ["--no-deps", "yunchang==0.6.4"]}
"""Module to what pip is told. yunchang's only dependency is torch, of which there is one already."""


def install(folder: Path = FOLDER) -> dict[str, str]:
    """Put what is missing into the folder and make it importable, here and in processes started from here.

    Returns:
        For each module that could not be installed, what pip said last.
    """
    sys.path.append(str(folder))  # the environment's own packages come first
    failed = {}
    for module, words in _WANTED.items():
        if importlib.util.find_spec(module) is None:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                failed[module] = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    importlib.invalidate_caches()
    return failed
