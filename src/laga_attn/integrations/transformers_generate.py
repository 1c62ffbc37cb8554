"""`generate()` of a parallelized Transformers model, with the latents in a `LatentCache`.

    laga.transformers.parallelize(model, cp=cp)
    cache = generation_cache(model, cp=cp)
    model.generate(input_ids, cache=cache, ...)

All ranks call `generate` alike. Between the model's inputs and its decoder stands a step of `laga_attn.inference`: the
rows of the batch lose their padding and become the new tokens of as many sequences, of which the decoder computes what
is this rank's; afterwards every rank gets the hidden states that the logits need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from laga_attn.agreement import agree
from laga_attn.attention_plan import LatentDims
from laga_attn.grid import ContextParallel
from laga_attn.inference.attention import attend, crossover
from laga_attn.inference.cache import LatentCache
from laga_attn.inference.derived import Derived
from laga_attn.inference.outputs import collect_rows
from laga_attn.inference.step import Step
from laga_attn.inference.workspace import WORKSPACE
from laga_attn.integrations.transformers_lora import latent_and_weight
from laga_attn.kernels import KernelName
from laga_attn.layout import Index, LayoutKind

__all__ = ["GenerationCache", "GenerationStep", "finish_call", "generation_cache"]

Arguments = dict[str, Any]


def generation_cache(
    model: nn.Module,
    *,
    cp: ContextParallel | None = None,
    dtype: torch.dtype | None = None,
    page_size: int = 64,
    max_tokens: int | None = None,
    rebuild_from: int | None = None,
    kind: LayoutKind = "zigzag",
    merge: str = "auto",
    workspace: int = WORKSPACE,
) -> GenerationCache:
    """An empty cache for `generate(..., cache=cache)` of a model given to `parallelize`.

    Args:
        model: the model.
        cp: the ranks that the model was parallelized over; None for one process.
        dtype: of storage, as for `LatentCache`; None: that of the model.
        page_size, max_tokens: as for `LatentCache`.
        rebuild_from, kind: as for `LatentCache.plan`; `rebuild_from=None`: at the `crossover` of the model's head
            sizes, and never so few tokens that ranks would be left without any.
        merge, workspace: as for `laga_attn.inference.attend`.

    Raises:
        ValueError: not an MLA model, or sizes that do not fit.
    """
    modules = [module for module in model.modules() if hasattr(module, "kv_b_proj") and hasattr(module, "layer_idx")]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no MLA attention: no module with a kv_b_proj and a layer_idx")
    cp = ContextParallel.none() if cp is None else cp
    first: Any = modules[0]
    weight = getattr(first.kv_b_proj, "base_layer", first.kv_b_proj).weight
    config = first.config
    dims = LatentDims(
        config.num_attention_heads,
        first.qk_nope_head_dim,
        config.qk_rope_head_dim,
        first.v_head_dim,
        config.kv_lora_rank,
    )
    latents = LatentCache(
        1 + max(int(module.layer_idx) for module in modules),  # type: ignore[arg-type]
        dims.kv_lora_rank,
        dims.qk_rope_head_dim,
        cp=cp,
        dtype=weight.dtype if dtype is None else dtype,
        page_size=page_size,
        max_tokens=max_tokens,
        device=weight.device,
        model=_fingerprint(model),
    )
    threshold = max(crossover(dims), 2 * cp.size) if rebuild_from is None else rebuild_from
    return GenerationCache(latents, threshold, kind, merge, workspace)


@dataclass(frozen=True, slots=True, eq=False)
class GenerationStep:
    """One call of the decoder, handed through the model to its attention modules and back."""

    cache: GenerationCache
    step: Step
    real: Tensor  # [B, S] bool: which inputs are tokens

    def attend(
        self, module: Any, query: Tensor, latent: Tensor, k_rope: Tensor, scale: float, kernel: KernelName
    ) -> Tensor:
        """`query [1, H, s, nope + rope]`, `latent [1, s, r]`, `k_rope [1, s, rope]`: returns `[1, s, H, v]`."""
        cache = self.cache
        return attend(
            query.transpose(1, 2),
            latent,
            k_rope,
            cache.weight_of(module),
            cache=cache.latents,
            step=self.step,
            layer=module.layer_idx,
            qk_nope_head_dim=module.qk_nope_head_dim,
            v_head_dim=module.v_head_dim,
            softmax_scale=scale,
            merge=cache.merge,
            kernel=kernel,
            workspace=cache.workspace,
        )

    def finish(self, hidden: Tensor) -> Tensor:
        """Hidden states of this rank's tokens `[1, s, D]` to those of the inputs `[B, S or fewer, D]`; commits."""
        columns = min(self.cache.last_columns or self.real.shape[1], self.real.shape[1])
        number = (self.real.flatten().cumsum(0) - 1).view_as(self.real)[:, -columns:]  # packed token of each input
        real = self.real[:, -columns:]
        wanted: Index = number[real].cpu().numpy().astype(np.int64)
        found = collect_rows(hidden[0], wanted, self.step, self.cache.latents.cp)
        whole = hidden.new_zeros(*real.shape, hidden.shape[-1])
        whole[real] = found
        self.cache.commit(self)
        return whole


class GenerationCache(Cache):
    """A `LatentCache` as Transformers' `generate()` wants it: row b of the batch is the sequence `sequences[b]`.

    Made by `generation_cache`. `latents` is the cache itself, with `memory()`, and to be exported from.
    """

    def __init__(
        self, latents: LatentCache, rebuild_from: int, kind: LayoutKind = "zigzag", merge: str = "auto",
        workspace: int = WORKSPACE,
    ) -> None:  # fmt: skip
        super().__init__(layers=[])
        self.latents = latents
        self.rebuild_from, self.kind, self.merge, self.workspace = rebuild_from, kind, merge, workspace
        self.sequences: list[int] = []
        self.columns = 0  # inputs per row so far, padding included: what Transformers calls the length
        self.last_columns: int | None = None  # how many of them the logits of this call are for; None: all
        self._weights: dict[int, Derived[Tensor]] = {}

    def adopt(self, sequences: Sequence[int]) -> None:
        """Go on from sequences of `latents`, one per row of the batch: forks of a prompt, or imported ones.

        Where their lengths differ, inputs need an `attention_mask` that shows each as padded on the left.

        Raises:
            ValueError: unknown sequences, or one for several rows.
        """
        if len(set(sequences)) < len(sequences):
            raise ValueError(f"each row needs a sequence of its own, got {list(sequences)}; make forks of shared ones")
        self.columns = max(map(self.latents.length, sequences), default=0)
        self.sequences = list(sequences)

    # What the hooks of a parallelized model call.

    def begin(
        self, call: Arguments, tokens: Tensor, cp: ContextParallel, error: str | None
    ) -> tuple[Arguments, Tensor]:
        """Turn a call of the decoder into one on this rank's part of the new tokens.

        Args:
            call: the call's arguments by name.
            tokens: its `input_ids [B, S]` or `inputs_embeds [B, S, D]`.
            cp: the ranks that the model was parallelized over.
            error: what is wrong with the call as far as is known.

        Returns:
            The arguments to call it with, and `[1, 1]`: the last position of the longest sequence.

        Raises:
            ValueError: on all ranks, if the call is wrong or differs on any of them; nothing has been stored.
        """
        batch, columns = tokens.shape[:2]
        fresh = not self.columns
        held = [0] * batch if fresh else [self.latents.length(sequence) for sequence in self.sequences]
        real = torch.ones(batch, columns, dtype=torch.bool, device=tokens.device)
        if call.get("attention_mask") is not None and call["attention_mask"].ndim == 2:
            real = call["attention_mask"][:, -columns:].bool()
        error = error or next(self._faults(call, tokens, real, held, cp), None)
        agree(cp, {"tokens": _digest(tokens), "mask": _digest(real), "shape": tuple(tokens.shape)}, error)
        if fresh:  # only now, that ranks which disagree still count their sequences alike
            self.reset()  # of what a call that failed may have left
            self.sequences = [self.latents.add() for _ in range(batch)]
        counts = dict(zip(self.sequences, real.sum(1).tolist(), strict=True))
        step = self.latents.plan(counts, rebuild_from=self.rebuild_from, kind=self.kind)
        name = "input_ids" if call.get("input_ids") is not None else "inputs_embeds"
        changed = {
            name: step.shard(tokens[real][None]),
            "position_ids": step.positions(tokens.device)[None],
            "attention_mask": None,
            "cache": None,
            "use_cache": False,
            "generation": GenerationStep(self, step, real),
        }
        last = max(segment.context + segment.new for segment in step.segments) - 1
        kept = {key: value for key, value in call.items() if key != "past_key_values"}
        return {**kept, **changed}, torch.tensor([[last]], device=tokens.device)

    def commit(self, done: GenerationStep) -> None:
        """Count the tokens of a step whose layers have all run."""
        self.latents.commit(done.step)
        self.columns += done.real.shape[1]
        self.last_columns = None

    def weight_of(self, module: Any) -> Tensor:
        """`kv_b_proj.weight` of an attention module, LoRA adapters added; computed when something has changed."""
        projection = module.kv_b_proj
        base: Tensor = getattr(projection, "base_layer", projection).weight
        if not hasattr(projection, "lora_A"):
            return base
        state = (tuple(projection.active_adapters), projection.disable_adapters, projection.merged)

        def add_adapters() -> Tensor:
            # Its columns tell what a linear map is: W I + B A I, with LoRA's dropout off.
            unit = torch.eye(base.shape[1], dtype=base.dtype, device=base.device)[None]
            latent, weight = latent_and_weight(projection, unit)
            return weight if weight is base else (weight.double() @ latent[0].double().mT).to(base.dtype)

        derived = self._weights.setdefault(module.layer_idx, Derived())
        return derived.get(tuple(projection.parameters()), state, add_adapters)

    def _faults(
        self, call: Arguments, tokens: Tensor, real: Tensor, held: list[int], cp: ContextParallel
    ) -> Iterator[str]:
        batch, columns = tokens.shape[:2]
        if self.latents.cp is not cp and (self.latents.cp.size, self.latents.cp.rank) != (cp.size, cp.rank):
            yield (
                f"the cache is spread over {self.latents.cp.size} ranks, but the model was parallelized over "
                f"{cp.size}; give generation_cache the same cp"
            )
        if batch != len(held):
            yield (
                f"the cache holds a batch of {len(held)} sequences, but the model got {batch}; "
                "use another cache for another batch"
            )
            return
        mask = call.get("attention_mask")
        if mask is not None and (mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < columns):
            yield f"attention_mask has shape {list(mask.shape)}, but with a latent cache it is [{batch}, tokens so far]"
            return
        before = None if mask is None or mask.shape[1] == columns else mask[:, :-columns].sum(1).tolist()
        if before is not None and before != held:
            yield (
                f"attention_mask shows {before} earlier tokens per row, but the cache holds {held}; tokens cannot be "
                "hidden afterwards"
            )
        for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
            if call.get(name):
                yield f"{name}=True is not supported together with a latent cache"
        positions = call.get("position_ids")
        if positions is not None:
            lengths = torch.tensor(held, device=real.device)[:, None]
            expected = (lengths + real.cumsum(1) - 1)[real]
            given = positions.expand(batch, -1)[:, -columns:]
            if given.shape != real.shape or not torch.equal(given[real], expected):
                yield "position_ids are not those of the tokens after what the cache holds; leave them out"

    # What generate() asks of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise ValueError("this cache serves models that were given to laga_attn's parallelize(); this one was not")

    def reset(self) -> None:
        """Forget everything."""
        for sequence in self.sequences:
            self.latents.free(sequence)
        self.sequences, self.columns = [], 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every sequence, as `generate` asks when drafts are rejected."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the negative number of tokens to remove, got {tokens_to_remove}")
        lengths = [self.latents.length(sequence) + tokens_to_remove for sequence in self.sequences]
        if min(lengths, default=0) < 0:
            raise ValueError(f"crop({tokens_to_remove}) would remove more tokens than the shortest sequence has")
        for sequence, length in zip(self.sequences, lengths, strict=True):
            self.latents.truncate(sequence, length)
        self.columns += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b continues what row `beam_idx[b]` was: a fork, which copies nothing but pages that are not full."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices.nonzero().flatten().tolist() if indices.dtype == torch.bool else indices.tolist())

    def _select(self, rows: list[int]) -> None:
        if rows == list(range(len(self.sequences))):
            return
        before = self.sequences
        self.sequences = [self.latents.fork(before[row]) for row in rows]
        for sequence in before:
            self.latents.free(sequence)

    @property
    def batch_size(self) -> int:
        return len(self.sequences) or -1

    @property
    def is_initialized(self) -> bool:
        return bool(self.sequences)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self)

    def __len__(self) -> int:
        return self.latents.num_layers

    def __repr__(self) -> str:
        return f"GenerationCache({len(self.sequences)} sequences, {self.columns} columns, {self.latents.memory()})"


def finish_call(decoder: nn.Module, args: object, kwargs: Arguments, output: Any) -> Any:
    """Forward hook on the decoder: hidden states of the inputs instead of those of this rank's tokens."""
    generation = kwargs.get("generation")
    if not isinstance(generation, GenerationStep):
        return None
    if isinstance(output, tuple):
        return (generation.finish(output[0]), *output[1:])
    output.last_hidden_state = generation.finish(output.last_hidden_state)
    output["cache"] = generation.cache
    return output


def _digest(tensor: Tensor) -> str:
    """A fingerprint of token ids, by which ranks that have sampled different tokens find out."""
    if tensor.is_floating_point():
        return "embeddings"
    return hashlib.blake2b(tensor.cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def _fingerprint(model: nn.Module) -> str:
    """Identifies a model by a few values of each of its parameters."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        sample = parameter.detach().flatten()[:: max(1, parameter.numel() // 8)][:8]
        digest.update(f"{name} {tuple(parameter.shape)} {sample.double().tolist()}".encode())
    return digest.hexdigest()
