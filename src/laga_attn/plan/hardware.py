"""Devices and networks that a plan can be made for: presets in `hardware.yaml`, or a file of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml

from laga_attn.train.errors import UsageError

__all__ = ["Figure", "Hardware", "load_hardware", "preset_names"]

_FIGURES: Final = (
    "bf16_tflops",
    "memory_gb",
    "memory_gbps",
    "node_gbps",
    "nic_gbps",
    "devices_per_node",
    "product_efficiency",
    "attention_forward_efficiency",
    "attention_backward_efficiency",
    "memory_efficiency",
    "link_efficiency",
    "node_latency_us",
    "nic_latency_us",
    "launch_us",
)
_ITEMSIZE: Final = 2  # bytes of the elements for which devices give `bf16_tflops`
_EXAMPLE: Final = "write lines such as 'memory_gb: {value: 80, source: datasheet, date: 2024-01}'"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, where it comes from, and the date of that source (`YYYY-MM`)."""

    value: float
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device in its node and network: GB/s in one direction, microseconds, fractions; see `hardware.yaml`."""

    name: str
    title: str
    bf16_tflops: Figure
    memory_gb: Figure
    memory_gbps: Figure
    node_gbps: Figure
    nic_gbps: Figure
    devices_per_node: Figure
    product_efficiency: Figure
    attention_forward_efficiency: Figure
    attention_backward_efficiency: Figure
    memory_efficiency: Figure
    link_efficiency: Figure
    node_latency_us: Figure
    nic_latency_us: Figure
    launch_us: Figure

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb.value * 1e9

    def computing_with(self, itemsize: int) -> Hardware:
        """This device with elements of `itemsize` bytes, 2 or 4: fp32 runs at half the 16-bit rate where it is TF32.

        That is the most; without tensor cores fp32 is slower still.
        """
        if itemsize <= _ITEMSIZE:
            return self
        bf16 = self.bf16_tflops
        source = f"{bf16.source}; fp32 as TF32 at half of it"
        return replace(self, bf16_tflops=replace(bf16, value=bf16.value * _ITEMSIZE / itemsize, source=source))

    def figures(self) -> dict[str, Figure]:
        """All figures by name."""
        return {name: getattr(self, name) for name in _FIGURES}


def preset_names() -> tuple[str, ...]:
    """Devices that `load_hardware` knows by name."""
    return tuple(_presets())


def load_hardware(name_or_path: str) -> Hardware:
    """A preset by name, or the device of a YAML file: one mapping of figures, in the form of a preset's.

    In a file, figures that are left out are taken from the preset that its `base` names (`h100` by default).

    Raises:
        UsageError: neither a preset nor a file; a file that is no YAML, with the line; figures that are unknown or not
            positive numbers with a source.
    """
    presets = _presets()
    if name_or_path.lower() in presets:
        return _hardware(name_or_path.lower(), presets[name_or_path.lower()])
    path = Path(name_or_path)
    if not path.is_file():
        raise UsageError(f"--hardware {name_or_path}: neither a preset ({', '.join(presets)}) nor a YAML file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hardware {path}: cannot be read as text: {error}") from None
    given = _parse(text, str(path))
    if not isinstance(given, Mapping):
        raise UsageError(f"{path}: not a mapping; {_EXAMPLE}")
    base = str(given.get("base", "h100"))
    if base not in presets:
        raise UsageError(f"{path}: unknown base {base!r}; choose one of {', '.join(presets)}")
    unknown = sorted(set(map(str, given)) - {"base", "title", *_FIGURES})
    if unknown:
        raise UsageError(f"{path}: unknown figure {unknown[0]!r}; known are title, base, {', '.join(_FIGURES)}")
    return _hardware(path.stem, {**presets[base], "title": path.stem, **given}, where=str(path))


def _presets() -> Mapping[str, Mapping[str, Any]]:
    text = files("laga_attn.plan").joinpath("hardware.yaml").read_text(encoding="utf-8")
    return {str(name): entry for name, entry in yaml.safe_load(text)["devices"].items()}


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{where}{place}: not valid YAML: {getattr(error, 'problem', error)}; {_EXAMPLE}") from None


def _hardware(name: str, entry: Mapping[str, Any], where: str = "hardware.yaml") -> Hardware:
    figures = {key: _figure(entry[key], f"{where}: {key}") for key in _FIGURES}
    for key in (key for key in _FIGURES if key.endswith("_efficiency")):
        if figures[key].value > 1:
            raise UsageError(f"{where}: {key} is a fraction of the peak, at most 1; got {figures[key].value}")
    return Hardware(name=name, title=str(entry["title"]), **figures)


def _figure(entry: Any, where: str) -> Figure:
    fields = {"value", "source", "date"}
    if not isinstance(entry, Mapping) or set(entry) != fields:
        raise UsageError(f"{where} needs value, source and date; {_EXAMPLE}")
    value = entry["value"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UsageError(f"{where}: value must be a positive number, got {value!r}")
    return Figure(float(value), str(entry["source"]), str(entry["date"]))
