"""Which models of Hugging Face Transformers can run context-parallel MLA, and why the others cannot."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MODELS", "ModelSupport", "check_model_type", "support_table"]


@dataclass(frozen=True, slots=True)
class ModelSupport:
    """One `config.model_type`: a note where it is supported, otherwise the reason why it is refused."""

    model_type: str
    note: str = ""
    refusal: str | None = None


_INDEXER = (
    "every query attends to keys that an indexer picks from the whole sequence (DSA), "
    "so scores of all tokens are needed before attention"
)
_LINEAR = "its linear-attention layers carry a state along the sequence, which would have to pass from rank to rank"

MODELS = (
    ModelSupport("deepseek_v2"),
    ModelSupport("deepseek_v3", "also Kimi-K2, Moonlight and other DeepSeek-V3 checkpoints"),
    ModelSupport("glm4_moe_lite"),
    ModelSupport("axk1"),
    ModelSupport("youtu"),
    ModelSupport("minicpm3", "LongRoPE uses the length of the longest document, not of the local shard"),
    ModelSupport("mistral4", "queries are scaled by position before attention, as in the stock model"),
    ModelSupport("longcat_flash", "both attention sublayers of a block; latents are rescaled before they travel"),
    ModelSupport("deepseek_v32", refusal=_INDEXER),
    ModelSupport("glm_moe_dsa", refusal=_INDEXER),
    ModelSupport("axk2", refusal=_INDEXER),
    ModelSupport("hy_v4", refusal=f"{_INDEXER}; its softmax also has learned sinks"),
    ModelSupport("hy_v4_vl", refusal=f"{_INDEXER}; its softmax also has learned sinks"),
    ModelSupport("hy_v4_vl_text", refusal=f"{_INDEXER}; its softmax also has learned sinks"),
    ModelSupport("mistral_large4", refusal=f"{_INDEXER}; some layers reuse the latents of others"),
    ModelSupport("mistral_large4_text", refusal=f"{_INDEXER}; some layers reuse the latents of others"),
    ModelSupport("dots3_note", refusal=f"{_INDEXER}, in some of its layers"),
    ModelSupport("dots3_note_text", refusal=f"{_INDEXER}, in some of its layers"),
    ModelSupport("glm5_next", refusal=f"{_INDEXER}; {_LINEAR}"),
    ModelSupport("glm5_next_text", refusal=f"{_INDEXER}; {_LINEAR}"),
    ModelSupport("kimi_linear", refusal=_LINEAR),
    ModelSupport("bailing_hybrid", refusal=_LINEAR),
)


def check_model_type(model_type: str) -> None:
    """Return if the model type is supported.

    Raises:
        ValueError: with the reason, or with the supported types if nothing is known about this one.
    """
    for model in MODELS:
        if model.model_type == model_type:
            if model.refusal is None:
                return
            raise ValueError(f"model type {model_type!r} cannot run context-parallel: {model.refusal}")
    supported = ", ".join(model.model_type for model in MODELS if model.refusal is None)
    raise ValueError(
        f"model type {model_type!r} is unknown, and its attention may do more than plain MLA; "
        f"supported model types: {supported}"
    )


def support_table() -> str:
    """The table of the documentation, in Markdown."""
    rows = [
        f"| `{model.model_type}` | {'yes' if model.refusal is None else 'no'} | {model.refusal or model.note} |"
        for model in MODELS
    ]
    return "\n".join(["| `model_type` | supported | notes |", "|---|---|---|", *rows])
