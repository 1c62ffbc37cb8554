"""MLAConfig: the sizes, the RoPE and the softmax scale of one MLA layer, read from and written to Hugging Face keys.

Sizes are named as in the Hugging Face configurations of DeepSeek. Beware of two false friends: Megatron's
``qk_head_dim`` is the part without rotation, and Hugging Face's ``config.head_dim`` is the rotated part; neither is read.
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

_DIMS: Final = (
    "hidden_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
# Hugging Face keys that look like MLA or RoPE and need no warning: what this module reads, and what follows from it.
_READ: Final = frozenset(
    {
        *_DIMS,
        "q_lora_rank",
        "qk_head_dim",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_interleave",
        "original_max_position_embeddings",
    }
)
_LOOKS_LIKE_MLA: Final = ("lora", "nope", "rope", "rotary", "mscale", "yarn", "v_head", "qk_", "mla_", "latent", "index_topk")
# Inside rope_parameters / rope_scaling.
_SCALING_NUMBERS: Final = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_SCALING_OPTIONS: Final = ("mscale", "mscale_all_dim", "attention_factor", "truncate")
_SCALING_READ: Final = frozenset({"type", "rope_type", "rope_theta", *_SCALING_NUMBERS, *_SCALING_OPTIONS})
# Model types of Transformers whose MLA pairs the two halves of the rotated part, without saying so in their config.
_PAIRS_HALVES: Final = frozenset({"minicpm3", "hy_v4"})
# Latents are normalised with this epsilon in DeepSeek's code and in Transformers, whatever ``rms_norm_eps`` says.
_LATENT_NORM_EPS: Final = 1e-6


def yarn_mscale(factor: float, mscale: float) -> float:
    """``0.1 * mscale * ln(factor) + 1``, or 1 for ``factor <= 1`` (YaRN, arXiv 2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How RoPE is stretched beyond the length of pretraining; the defaults mean that it is not.

    Attributes:
        rope_type: ``"default"`` or ``"yarn"``; other types of Transformers are kept but cannot be computed here.
        factor: the ratio of the stretched length to the original one.
        original_max_position_embeddings: positions seen in pretraining.
        beta_fast, beta_slow: rotations over the original length above which a frequency is left alone, and below
            which it is divided by ``factor``; in between YaRN blends.
        mscale, mscale_all_dim: weights of YaRN's temperature, see :attr:`cos_sin_factor` and
            :attr:`MLAConfig.softmax_scale`.
        attention_factor: replaces :attr:`cos_sin_factor` if given.
        truncate: whether the limits of the blend are rounded to whole dimensions.
        extra: keys of ``rope_parameters`` that nothing here interprets, kept for :meth:`MLAConfig.to_hf`.

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
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.rope_type != "yarn":
            return
        if not self.factor >= 1:
            raise ValueError(f"YaRN's factor must be at least 1 (stretched over original length), got {self.factor}")
        if self.original_max_position_embeddings is None or self.original_max_position_embeddings < 1:
            raise ValueError(
                "YaRN needs original_max_position_embeddings, the positive number of positions seen in pretraining; "
                f"got {self.original_max_position_embeddings}"
            )
        if not self.beta_fast >= self.beta_slow > 0:
            raise ValueError(
                "YaRN's beta_fast and beta_slow are rotations over the original length, with "
                f"beta_fast >= beta_slow > 0; got beta_fast={self.beta_fast}, beta_slow={self.beta_slow}"
            )

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied with: YaRN's temperature as far as the softmax scale does not carry it.

        With both ``mscale`` and ``mscale_all_dim`` set it is ``yarn_mscale(factor, mscale)`` over
        ``yarn_mscale(factor, mscale_all_dim)``, as in DeepSeek's code and in Transformers; else
        ``yarn_mscale(factor, 1)``. It is 1 without YaRN.
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
        hidden_size, num_attention_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: sizes in
            elements; ``qk_rope_head_dim`` is even.
        q_lora_rank: width of the query latent, ``None`` for a single query projection.
        rms_norm_eps: epsilon of the model's norms outside attention.
        latent_norm_eps: epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``. DeepSeek's code and Transformers use
            1e-6 there, whatever ``rms_norm_eps`` is.
        attention_bias: whether the projections from and to the hidden size have a bias.
        rope_theta: base of the rotary frequencies.
        rope_interleave: whether rotary pairs lie next to each other in the projections' output, or a half apart.
        max_position_embeddings: the longest sequence that the model is meant for.
        rope_scaling: YaRN, if the model has it.
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
    max_position_embeddings: int = 4096
    rope_scaling: RopeScaling = RopeScaling()
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in (*_DIMS, "max_position_embeddings")}
        if self.q_lora_rank is not None:
            sizes["q_lora_rank"] = self.q_lora_rank
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                hint = "; without a query latent it is None" if name == "q_lora_rank" else ""
                raise ValueError(f"{name} must be a positive integer, got {value!r}{hint}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even, for RoPE rotates pairs; got {self.qk_rope_head_dim}")
        for name in ("rms_norm_eps", "latent_norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        rotated = self.extra.get("partial_rotary_factor", 1.0)
        if rotated not in (1.0, self.qk_rope_head_dim / self.qk_head_dim):
            raise ValueError(
                f"partial_rotary_factor={rotated} rotates only a part of the {self.qk_rope_head_dim} dimensions of "
                "qk_rope_head_dim, which is not supported; it must be 1, or qk_rope_head_dim / qk_head_dim"
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head, the rotated part included."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """``m^2 / sqrt(qk_head_dim)`` with ``m = 0.1 * mscale_all_dim * ln(factor) + 1``; m = 1 without scaled RoPE."""
        scaling = self.rope_scaling
        stretched = scaling.rope_type != "default" and scaling.mscale_all_dim
        m = yarn_mscale(scaling.factor, scaling.mscale_all_dim or 0.0) if stretched else 1.0
        return m * m / math.sqrt(self.qk_head_dim)

    @classmethod
    def preset(cls, name: str) -> MLAConfig:
        """The layer of a published model, see :func:`laga_attn.presets.preset_names`.

        Raises:
            ValueError: unknown name.
        """
        return cls.from_hf(presets.hf_config(name))

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any] | Any) -> MLAConfig:
        """Read a Hugging Face configuration: of Transformers 5 (``rope_parameters``) or older (``rope_scaling``).

        Args:
            source: a ``config.json`` or the folder that holds one (nothing is downloaded), the dict in it, or a
                Transformers config object. A multimodal configuration is read at its ``text_config``.

        Warns:
            UserWarning: naming keys that look like MLA's and are not understood: the model may compute something
                that this layer does not. Their values are kept in ``extra``.

        Raises:
            ValueError: not an MLA model, sizes missing or out of range, two spellings of RoPE that contradict.
        """
        hf = _language_model(_as_dict(source))
        if hf.get("kv_lora_rank") is None:
            raise ValueError(
                f"this config (model_type {hf.get('model_type')!r}) has no kv_lora_rank: not an MLA model. MLA models "
                "are DeepSeek-V2, DeepSeek-V3 and their relatives."
            )
        missing = [name for name in _DIMS if hf.get(name) is None]
        if missing:
            raise ValueError(f"this config has a kv_lora_rank, but lacks other sizes of MLA: {', '.join(missing)}")
        extra = {key: copy.deepcopy(hf[key]) for key in hf if _is_mla_key(key) and key not in _READ}
        scaling, theta = _read_rope(hf)
        _warn_about({**extra, **scaling.extra})
        interleave = hf.get("rope_interleave")
        optional = {
            name: hf[name]
            for name in ("q_lora_rank", "rms_norm_eps", "attention_bias", "max_position_embeddings")
            if hf.get(name) is not None
        }
        return cls(
            **{name: hf[name] for name in _DIMS},
            **optional,
            latent_norm_eps=extra.pop("latent_norm_eps", _LATENT_NORM_EPS),
            rope_theta=theta,
            rope_interleave=hf.get("model_type") not in _PAIRS_HALVES if interleave is None else bool(interleave),
            rope_scaling=scaling,
            extra=extra,
        )

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face keys of this layer, RoPE in the spelling of Transformers 5 and in the older one.

        ``MLAConfig.from_hf(cfg.to_hf()) == cfg``, and every MLA and RoPE key of the configuration that was read is
        there with its value, so updating a whole-model config dict with the result changes nothing in it.
        """
        names = (*_DIMS, "q_lora_rank", "rms_norm_eps", "attention_bias", "rope_interleave", "max_position_embeddings")
        hf = {name: getattr(self, name) for name in names}
        if self.latent_norm_eps != _LATENT_NORM_EPS:
            hf["latent_norm_eps"] = self.latent_norm_eps
        parameters = _write_scaling(self.rope_scaling)
        hf["rope_theta"] = self.rope_theta
        hf["rope_parameters"] = {"rope_theta": self.rope_theta, **parameters}
        plain = self.rope_scaling.rope_type == "default"
        hf["rope_scaling"] = None if plain else {"type": self.rope_scaling.rope_type, **parameters}
        return {**hf, **copy.deepcopy(dict(self.extra))}


def _as_dict(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(
                f"no Hugging Face config at {str(file)!r}: give a config.json or the folder that holds it; models are "
                "not downloaded"
            )
        loaded = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(loaded, dict):
            raise ValueError(f"{str(file)!r} holds a JSON {type(loaded).__name__}, not an object")
        return loaded
    if callable(getattr(source, "to_dict", None)):
        as_dict: dict[str, Any] = source.to_dict()
        return as_dict
    raise ValueError(f"a config is a path, a dict or a Transformers config object, got {type(source).__name__}")


def _language_model(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a multimodal configuration that describes the language model, or all of another one."""
    for key in ("text_config", "language_config"):
        if hf.get("kv_lora_rank") is None and isinstance(hf.get(key), Mapping):
            return _as_dict(hf[key])
    return hf


def _is_mla_key(key: str) -> bool:
    return any(part in key for part in _LOOKS_LIKE_MLA)


def _warn_about(unread: Mapping[str, Any]) -> None:
    # A key that is off (false or null) asks for nothing.
    harmless = ("latent_norm_eps", "partial_rotary_factor")
    unknown = [key for key, value in unread.items() if key not in harmless and value not in (None, False)]
    if unknown:
        warnings.warn(
            f"this config has MLA or RoPE keys that laga-attn does not interpret: {', '.join(sorted(unknown))}. They are "
            "kept; check that the layer computes what the model expects.",
            UserWarning,
            stacklevel=4,
        )


def _read_rope(hf: Mapping[str, Any]) -> tuple[RopeScaling, float]:
    """RoPE from ``rope_parameters`` and the older ``rope_scaling`` with ``rope_theta`` beside it."""
    new, old = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    for key in new.keys() & old.keys():
        if new[key] != old[key]:
            raise ValueError(
                f"rope_parameters[{key!r}]={new[key]!r} contradicts rope_scaling[{key!r}]={old[key]!r}: remove one of the two"
            )
    rope = {**old, **new}
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(
            f"rope_parameters differ by layer type ({', '.join(nested)}); give a config whose rope_parameters are those of "
            "the MLA layers"
        )
    theta = rope.get("rope_theta") or hf.get("rope_theta") or 10000.0
    return _read_scaling(rope, hf), float(theta)


def _read_scaling(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> RopeScaling:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "deepseek_yarn":  # another name for the same
        rope_type = "yarn"
    values = {key: rope[key] for key in (*_SCALING_NUMBERS, *_SCALING_OPTIONS) if rope.get(key) is not None}
    if rope_type != "default":
        longest = hf.get("max_position_embeddings", 4096)
        original = hf.get("original_max_position_embeddings", longest)
        original = values.setdefault("original_max_position_embeddings", original)
        values.setdefault("factor", longest / original)
    extra = {key: copy.deepcopy(value) for key, value in rope.items() if key not in _SCALING_READ}
    return RopeScaling(rope_type=rope_type, extra=extra, **values)


def _write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    default = RopeScaling()
    written: dict[str, Any] = {"rope_type": scaling.rope_type}
    numbers = _SCALING_NUMBERS if scaling.rope_type == "yarn" else ()
    for key in (*_SCALING_NUMBERS, *_SCALING_OPTIONS):
        value = getattr(scaling, key)
        if key in numbers or value != getattr(default, key):
            written[key] = value
    return {**written, **copy.deepcopy(dict(scaling.extra))}
