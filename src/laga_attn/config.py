"""MLAConfig: the sizes, RoPE and softmax scale of one MLA layer, read from and written to Hugging Face keys.

Sizes are named as in the Hugging Face configurations of DeepSeek. Beware of two false friends that are never
read: Megatron's ``qk_head_dim`` is the part without rotation, and ``config.head_dim`` of Hugging Face is the
rotated part alone.
"""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from laga_attn import presets

__all__ = ["MLAConfig", "RopeScaling", "yarn_mscale"]

_SIZES: Final = (
    "hidden_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_OPTIONAL: Final = ("q_lora_rank", "rms_norm_eps", "attention_bias", "max_position_embeddings")
_ROPE: Final = ("rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "partial_rotary_factor")
_READ: Final = frozenset({*_SIZES, *_OPTIONAL, *_ROPE, "qk_head_dim", "latent_norm_eps"})
# Keys that have one of these in their name are about MLA, RoPE or which keys a query sees.
_LOOKS_LIKE_MLA: Final = ("lora", "nope", "rope", "rotary", "mscale", "v_head", "qk_", "mla_", "index_topk")
_SCALING: Final = (  # keys of rope_parameters, and fields of RopeScaling
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "partial_rotary_factor",
)
# Model types of Transformers whose rotary pairs lie a half apart without a word about it in their config.
_PAIRS_HALVES: Final = frozenset({"minicpm3", "hy_v4"})
_LATENT_NORM_EPS: Final = 1e-6
_MAX_POSITIONS: Final = 4096


def yarn_mscale(factor: float, mscale: float) -> float:
    """``0.1 * mscale * ln(factor) + 1``, or 1 for ``factor <= 1`` (YaRN, arXiv 2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How RoPE is stretched beyond the length of pretraining; the defaults mean that it is not.

    Attributes:
        rope_type: ``"default"`` or ``"yarn"``; other types are kept, but nothing here computes them.
        factor: the ratio of the stretched length to the original one.
        original_max_position_embeddings: positions seen in pretraining.
        beta_fast, beta_slow: a frequency that turns more than ``beta_fast`` times over the original length
            is left alone, one that turns less than ``beta_slow`` times is divided by ``factor``, and YaRN
            blends in between.
        mscale, mscale_all_dim: weights of YaRN's temperature, see :attr:`cos_sin_factor` and
            :attr:`MLAConfig.softmax_scale`.
        attention_factor: replaces :attr:`cos_sin_factor` if given.
        truncate: whether the ends of the blend are rounded to whole dimensions.
        partial_rotary_factor: what Transformers calls the rotated part; says nothing new, kept for
            :meth:`MLAConfig.to_hf`.
        extra: other keys of ``rope_parameters``, kept for :meth:`MLAConfig.to_hf`.

    Raises:
        ValueError: a value out of range.
    """

    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    partial_rotary_factor: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.rope_type != "yarn":
            return
        if not self.factor >= 1:
            raise ValueError(f"YaRN's factor, stretched / original length, is at least 1; got {self.factor}")
        original = self.original_max_position_embeddings
        if original is None or original < 1:
            raise ValueError(
                "YaRN needs original_max_position_embeddings, the positive number of positions seen in "
                f"pretraining; got {original}"
            )
        if not self.beta_fast >= self.beta_slow > 0:
            raise ValueError(
                "YaRN needs beta_fast >= beta_slow > 0 (turns over the original length); got "
                f"beta_fast={self.beta_fast}, beta_slow={self.beta_slow}"
            )

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied with: the part of YaRN's temperature outside the softmax scale.

        With ``mscale`` and ``mscale_all_dim`` both set it is ``yarn_mscale(factor, mscale)`` over
        ``yarn_mscale(factor, mscale_all_dim)``, as in DeepSeek's code and Transformers; otherwise
        ``yarn_mscale(factor, 1)``. Without YaRN it is 1.
        """
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Sizes and constants of one MLA layer, under the names that Hugging Face gives them.

    Attributes:
        hidden_size, num_attention_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: sizes,
            in elements; ``qk_rope_head_dim`` is even.
        q_lora_rank: width of the query latent; ``None`` for a single query projection.
        rms_norm_eps: epsilon of the norms outside attention.
        latent_norm_eps: epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``: 1e-6 in DeepSeek's code and in
            Transformers, whatever ``rms_norm_eps`` is.
        attention_bias: whether the projections that read or write the hidden state have a bias (all but
            ``q_proj``).
        rope_theta: base of the rotary frequencies.
        rope_interleave: whether rotary pairs lie side by side in what the projections return; otherwise they
            are half of ``qk_rope_head_dim`` apart.
        max_position_embeddings: the longest sequence that the model is meant for.
        rope_scaling: YaRN, where the model has it.
        extra: keys that look like MLA's and that nothing here interprets, kept for :meth:`to_hf`.

    Raises:
        ValueError: a value out of range.
    """

    hidden_size: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rms_norm_eps: float = 1e-6
    latent_norm_eps: float = _LATENT_NORM_EPS
    attention_bias: bool = False
    rope_theta: float = 10000.0
    rope_interleave: bool = True
    max_position_embeddings: int = _MAX_POSITIONS
    rope_scaling: RopeScaling = RopeScaling()
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in (*_SIZES, "q_lora_rank", "max_position_embeddings"):
            value = getattr(self, name)
            if name == "q_lora_rank" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                hint = ", or None without a query latent" if name == "q_lora_rank" else ""
                raise ValueError(f"{name} must be a positive integer{hint}; got {value!r}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even to form pairs; got {self.qk_rope_head_dim}")
        for name in ("rms_norm_eps", "latent_norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        # Transformers counts the rotated part against itself or against the whole head.
        rotated = self.rope_scaling.partial_rotary_factor
        if rotated not in (None, 1.0, self.qk_rope_head_dim / self.qk_head_dim):
            raise ValueError(
                f"partial_rotary_factor={rotated} must be 1 or qk_rope_head_dim / qk_head_dim = "
                f"{self.qk_rope_head_dim}/{self.qk_head_dim}: the rotated part is rotated whole"
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head, the rotated part included."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """``m^2 / sqrt(qk_head_dim)`` with ``m = yarn_mscale(factor, mscale_all_dim)``, 1 for plain RoPE."""
        scaling = self.rope_scaling
        m = 1.0
        if scaling.rope_type != "default" and scaling.mscale_all_dim:
            m = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
        return m * m / math.sqrt(self.qk_head_dim)

    @classmethod
    def preset(cls, name: str) -> MLAConfig:
        """The layer of a published model, one of :func:`laga_attn.presets.preset_names`.

        Raises:
            ValueError: unknown name.
        """
        return cls.from_hf(presets.hf_config(name))

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any] | Any) -> MLAConfig:
        """Read a Hugging Face configuration, with RoPE as in Transformers 5 (``rope_parameters``) or before.

        Args:
            source: a ``config.json`` or the folder that holds one (nothing is downloaded), the dict in it, or
                a Transformers config object. A multimodal configuration is read at its ``text_config``.

        Warns:
            UserWarning: naming keys that look like MLA's and are not understood: the model may compute what
                this layer does not. Their values are kept in ``extra``.

        Raises:
            ValueError: not an MLA model, sizes missing or out of range, keys that contradict each other.
        """
        hf = _language_model(_as_dict(source))
        _check_sizes(hf)
        scaling, theta = _read_rope(hf)
        extra = {
            key: copy.deepcopy(value)
            for key, value in hf.items()
            if key not in _READ and any(part in key for part in _LOOKS_LIKE_MLA)
        }
        _warn_about({**extra, **scaling.extra})
        interleave = hf.get("rope_interleave")
        if interleave is None:
            interleave = hf.get("model_type") not in _PAIRS_HALVES
        given = (*_SIZES, *_OPTIONAL, "latent_norm_eps")
        return cls(
            **{name: hf[name] for name in given if hf.get(name) is not None},
            rope_theta=theta,
            rope_interleave=interleave,
            rope_scaling=scaling,
            extra=extra,
        )

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face keys of this layer, RoPE both as in Transformers 5 and as before.

        ``MLAConfig.from_hf(cfg.to_hf()) == cfg``. Every MLA and RoPE key of a configuration that was read is
        there with its value, so a whole model's dict can be updated with the result.
        """
        names = (*_SIZES, "qk_head_dim", *_OPTIONAL, "rope_theta", "rope_interleave")
        hf = {name: getattr(self, name) for name in names}
        if self.latent_norm_eps != _LATENT_NORM_EPS:  # a key of ours, written only if it says something
            hf["latent_norm_eps"] = self.latent_norm_eps
        parameters = _write_scaling(self.rope_scaling)
        hf["rope_scaling"] = parameters if self.rope_scaling.rope_type != "default" else None
        hf["rope_parameters"] = {"rope_theta": self.rope_theta, **parameters}
        if self.rope_scaling.partial_rotary_factor is not None:
            hf["partial_rotary_factor"] = self.rope_scaling.partial_rotary_factor
        return {**hf, **copy.deepcopy(dict(self.extra))}


def _as_dict(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(
                f"no Hugging Face config at {str(file)!r}: give a config.json or the folder that holds it; "
                "nothing is downloaded"
            )
        loaded = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(loaded, dict):
            raise ValueError(f"{str(file)!r} must hold a JSON object, not a {type(loaded).__name__}")
        return loaded
    if callable(getattr(source, "to_dict", None)):
        converted: dict[str, Any] = source.to_dict()
        return converted
    raise ValueError(f"a config is a path, a dict or a Transformers config, got a {type(source).__name__}")


def _language_model(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a multimodal configuration that describes the language model; all of any other."""
    if hf.get("kv_lora_rank") is None:
        for key in ("text_config", "language_config"):
            if isinstance(hf.get(key), Mapping):
                return _as_dict(hf[key])
    return hf


def _check_sizes(hf: Mapping[str, Any]) -> None:
    if hf.get("kv_lora_rank") is None:
        raise ValueError(
            f"this config has no kv_lora_rank: not an MLA model (model_type {hf.get('model_type')!r}). MLA "
            f"models are DeepSeek-V2, DeepSeek-V3 and relatives; presets: {', '.join(presets.preset_names())}"
        )
    missing = [name for name in _SIZES if hf.get(name) is None]
    if missing:
        raise ValueError(f"this config has a kv_lora_rank, but of MLA's sizes it lacks {', '.join(missing)}")
    whole, parts = hf.get("qk_head_dim"), (hf["qk_nope_head_dim"], hf["qk_rope_head_dim"])
    if whole not in (None, sum(parts)):
        raise ValueError(
            f"qk_head_dim={whole} must be qk_nope_head_dim + qk_rope_head_dim = {parts[0]} + {parts[1]}; "
            "correct it, or leave it out"
        )


def _warn_about(unread: Mapping[str, Any]) -> None:
    # A key that is off (false or null) asks for nothing.
    unknown = sorted(key for key, value in unread.items() if value not in (None, False))
    if unknown:
        warnings.warn(
            f"this config has MLA or RoPE keys that are not understood: {', '.join(unknown)}. They are kept, "
            "but make sure that the model computes plain MLA.",
            UserWarning,
            stacklevel=3,
        )


def _read_rope(hf: Mapping[str, Any]) -> tuple[RopeScaling, float]:
    """The scaling and the base, from ``rope_parameters`` or from ``rope_scaling`` beside ``rope_theta``."""
    new, old = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    for key in new.keys() & old.keys():
        if new[key] != old[key]:
            raise ValueError(
                f"rope_parameters has {key}={new[key]!r}, rope_scaling has {key}={old[key]!r}: remove one of the two"
            )
    rope = {**old, **new}
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(
            f"rope_parameters differ by layer type ({', '.join(nested)}): give a config with those of the MLA layers"
        )
    theta = rope.get("rope_theta") or hf.get("rope_theta") or 10000.0
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "deepseek_yarn":  # another name of the same
        rope_type = "yarn"
    rope.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor"))
    values = {key: rope[key] for key in _SCALING if rope.get(key) is not None}
    if rope_type == "yarn":
        # As Transformers does: a value beside rope_parameters goes first, the longest length fills the gaps.
        longest = hf.get("max_position_embeddings") or _MAX_POSITIONS
        outside = hf.get("original_max_position_embeddings")
        original = outside or values.get("original_max_position_embeddings") or longest
        values["original_max_position_embeddings"] = original
        values.setdefault("factor", longest / original)
    read = {"type", "rope_type", "rope_theta", *_SCALING}
    extra = {key: copy.deepcopy(value) for key, value in rope.items() if key not in read}
    return RopeScaling(rope_type=rope_type, extra=extra, **values), float(theta)


def _write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    plain = RopeScaling()
    written: dict[str, Any] = {"rope_type": scaling.rope_type}
    if scaling.rope_type != "default":
        written["type"] = scaling.rope_type
    for key in _SCALING:
        value = getattr(scaling, key)
        if value is not None and (scaling.rope_type == "yarn" or value != getattr(plain, key)):
            written[key] = value
    return {**written, **copy.deepcopy(dict(scaling.extra))}
