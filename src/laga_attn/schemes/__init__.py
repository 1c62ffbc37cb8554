"""The schemes: what to move between ranks, and when to rebuild K and V. A new scheme is one file and one line here."""

from __future__ import annotations

from laga_attn.schemes import absorbed, explicit, laga
from laga_attn.schemes.interface import SchemeImpl

__all__ = ["SCHEME_TABLE", "SchemeImpl"]

SCHEME_TABLE: dict[str, SchemeImpl] = {
    "explicit": SchemeImpl(explicit.forward, explicit.backward),
    "absorbed": SchemeImpl(absorbed.forward, absorbed.backward),
    "laga": SchemeImpl(laga.forward, laga.backward),
}
