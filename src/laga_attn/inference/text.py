"""Text to tokens and, token by token, back: with the model's own tokenizer, or byte by byte."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any, Protocol

from laga_attn.train.data import DOCUMENT_START, VOCAB_SIZE
from laga_attn.train.errors import UsageError

__all__ = ["ByteText", "Text", "TokenizerText", "open_text"]


class Text(Protocol):
    """A model's text."""

    end: int | None
    """The token after which a text is over, if there is one."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt; at least one."""
        ...

    def feed(self, token: int) -> str:
        """The text that one more token completes; what is not a whole character yet is held back."""
        ...


class ByteText:
    """Bytes after a document start, as `laga-attn train` reads them."""

    end: int | None = DOCUMENT_START

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def encode(self, text: str) -> list[int]:
        return [DOCUMENT_START, *text.encode()]

    def feed(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < DOCUMENT_START else ""


class TokenizerText:
    """A tokenizer of Transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []  # tokens since the last line that was handed out whole
        self._shown = ""
        self.end: int | None = tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer(text).input_ids
        if not tokens and self._tokenizer.bos_token_id is None:
            raise UsageError("an empty --prompt needs a model with a begin-of-text token; give some text")
        return tokens or [self._tokenizer.bos_token_id]

    def feed(self, token: int) -> str:
        self._held.append(token)
        text: str = self._tokenizer.decode(self._held, skip_special_tokens=True)
        if text.endswith("\ufffd"):  # part of a character
            return ""
        new, self._shown = text[len(self._shown) :], text
        if text.endswith("\n"):
            self._held, self._shown = [], ""
        return new


def open_text(folder: Path, vocab_size: int) -> Text:
    """The tokenizer of a checkpoint; bytes where it has none.

    Raises:
        UsageError: no tokenizer, and too few token ids for bytes.
    """
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        from transformers import AutoTokenizer

        return TokenizerText(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    if vocab_size < VOCAB_SIZE:
        raise UsageError(
            f"--model {folder} has no tokenizer, and its {vocab_size} token ids are too few for bytes ({VOCAB_SIZE})"
        )
    return ByteText()
