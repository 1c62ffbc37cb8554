"""The model of a run: found by name or path, checked, built, and written out for others to load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from laga_attn.presets import hf_config, preset_names
from laga_attn.train.data import VOCAB_SIZE
from laga_attn.train.errors import UsageError
from laga_attn.train.options import Ranks, TrainOptions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["ModelSource", "build", "check", "export", "find_model", "optimizer_groups"]

_MLA_FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A Hugging Face configuration, and the folder to load weights from (None: start from random ones)."""

    config: PreTrainedConfig
    weights: Path | None


def find_model(name: str) -> ModelSource:
    """The model that `--model` names: a preset, a config file or a checkpoint directory, all local.

    Raises:
        UsageError: nothing of that name, or a folder or file that cannot be used.
    """
    from transformers import AutoConfig

    path = Path(name)
    if name in preset_names():
        return ModelSource(AutoConfig.for_model(**hf_config(name)), None)
    if not path.exists():
        raise UsageError(
            f"--model {name} is neither a preset ({', '.join(preset_names())}) nor a config file or checkpoint "
            "directory"
        )
    config_file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(config_file.read_text())
        config = AutoConfig.for_model(**fields)
    except (OSError, UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"--model {name}: {config_file} is not a Hugging Face model config ({_brief(error)})"
        ) from error
    if path.is_dir() and not any(path.glob("*.safetensors")):
        raise UsageError(
            f"--model {name} holds no *.safetensors weights; to start from random ones give {config_file} itself"
        )
    return ModelSource(config, path if path.is_dir() else None)


def check(config: PreTrainedConfig, options: TrainOptions, ranks: Ranks) -> None:
    """Whether the model can be trained as asked.

    Raises:
        UsageError: not an MLA model, attention dropout, too few token ids, heads that do not divide, or too long a
            sequence.
    """
    missing = [field for field in _MLA_FIELDS if not isinstance(getattr(config, field, None), int)]
    if missing:
        raise UsageError(
            f"--model {options.model} ({config.model_type}) is not a multi-head latent attention model: its "
            f"config has no {', '.join(missing)}; choose a DeepSeek-style model or one of the presets "
            f"{', '.join(preset_names())}"
        )
    if dropout := getattr(config, "attention_dropout", 0.0):
        raise UsageError(
            f"--model {options.model} has attention_dropout {dropout}, which split attention does not do; set it to 0"
        )
    if config.vocab_size < VOCAB_SIZE:
        raise UsageError(
            f"--model {options.model} has vocab_size {config.vocab_size}; training on bytes needs at least "
            f"{VOCAB_SIZE} (256 byte values and a document start)"
        )
    degree = options.ulysses_degree or 1
    heads, cp = config.num_attention_heads, ranks.context_parallel
    if heads % degree:
        fitting = [d for d in range(1, cp + 1) if cp % d == 0 and heads % d == 0]
        raise UsageError(
            f"--ulysses-degree {degree} does not divide the {heads} attention heads of --model "
            f"{options.model}; choose one of {fitting}"
        )
    if options.seq_len > config.max_position_embeddings:
        raise UsageError(
            f"--seq-len {options.seq_len} exceeds the model's max_position_embeddings "
            f"{config.max_position_embeddings}; shorten it or raise that number in the config"
        )


def build(source: ModelSource, options: TrainOptions, device: torch.device) -> PreTrainedModel:
    """The model in fp32 on `device`, ready to train. Random weights depend on the seed alone."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(options.seed)
    factory: Any = AutoModelForCausalLM
    with _quiet():
        model: PreTrainedModel
        if source.weights is None:
            model = factory.from_config(source.config, dtype=torch.float32)
        else:
            model = factory.from_pretrained(source.weights, dtype=torch.float32, local_files_only=True)
    model.to(device)  # type: ignore[arg-type]
    if options.activation_checkpointing:
        model.activation_checkpointing_enable()
    model.train()
    return model


def optimizer_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW parameter groups: matrices decay, vectors (norms, biases) do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def export(model: PreTrainedModel, folder: Path) -> None:
    """Write a checkpoint for `AutoModelForCausalLM.from_pretrained(folder)`; `folder` is whole or absent."""
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    with _quiet():
        model.save_pretrained(unfinished)
    if folder.exists():
        folder.rmdir()  # empty: anything else was refused before the run
    os.replace(unfinished, folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Transformers' own progress bars would tear ours."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
