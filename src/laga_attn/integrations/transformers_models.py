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


_INDEXER = "an indexer picks the keys of every query from the whole sequence (DSA) and builds a mask of S x S"
_LINEAR = "its linear-attention layers carry a state along the sequence, from one rank to the next"
_IMAGES = "it merges images into the sequence first"

MODELS = (
    ModelSupport("deepseek_v2"),
    ModelSupport("deepseek_v3", "also checkpoints of others that use it, such as Kimi-K2 and Moonlight"),
    ModelSupport("glm4_moe_lite"),
    ModelSupport("axk1"),
    ModelSupport("youtu"),
    ModelSupport("sarvam_mla"),
    ModelSupport("minicpm3", "LongRoPE goes by the longest document, not by what one rank holds"),
    ModelSupport("mistral4", "queries are scaled by position, as in the stock model"),
    ModelSupport("longcat_flash", "both attention layers of a block"),
    ModelSupport("kimi_k25", refusal=f"{_IMAGES}; parallelize its text decoder and give that inputs_embeds"),
    ModelSupport("deepseek_v32", refusal=_INDEXER),
    ModelSupport("glm_moe_dsa", refusal=_INDEXER),
    ModelSupport("axk2", refusal=_INDEXER),
    ModelSupport("hy_v4", refusal=f"{_INDEXER}; its softmax has learned sinks"),
    ModelSupport("hy_v4_vl", refusal=f"{_INDEXER}; its softmax has learned sinks; {_IMAGES}"),
    ModelSupport("hy_v4_vl_text", refusal=f"{_INDEXER}; its softmax has learned sinks"),
    ModelSupport("mistral_large4", refusal=f"{_INDEXER}; {_IMAGES}"),
    ModelSupport("mistral_large4_text", refusal=_INDEXER),
    ModelSupport("dots3_note", refusal=f"{_INDEXER}, in some of its layers; {_IMAGES}"),
    ModelSupport("dots3_note_text", refusal=f"{_INDEXER}, in some of its layers"),
    ModelSupport("glm5_next", refusal=f"{_INDEXER}; {_LINEAR}; {_IMAGES}"),
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
        f"| `{model.model_type}` | {'no' if model.refusal else 'yes'} | {model.refusal or model.note} |"
        for model in MODELS
    ]
    return "\n".join(["| `model_type` | supported | notes |", "|---|---|---|", *rows])
