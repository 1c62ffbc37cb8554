"""Draw what crosses the wire in each scheme: bytes per token and layer at DeepSeek-V3 size, P = 8, bf16.

Numbers come from the closed forms that the traffic tests check against real ranks. Run `make figures`.
"""

from __future__ import annotations

from pathlib import Path

from laga_attn.attention_plan import LatentDims
from laga_attn.auto import port_elements

DIMS = LatentDims(num_heads=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512)
RANKS = 8
ROWS = (
    ("explicit, U=1", "explicit", 1, "K and V of every head to every rank"),
    ("explicit, U=8", "explicit", 8, "Ulysses: Q, K, V and outputs by head"),
    ("absorbed, U=8", "absorbed", 8, "latent gathered; attention 3.4x the FLOPs"),
    ("laga, U=8", "laga", 8, "latent gathered; Q and outputs by head"),
    ("laga, U=1", "laga", 1, "the latent and nothing else"),
)
QUERY_COLOUR, KV_COLOUR, LATENT_COLOUR = "#7a8fa6", "#d1495b", "#2a9d8f"
LABEL, BAR, LINE, TOP = 124, 430, 52, 74


def parts(scheme: str, degree: int) -> list[tuple[str, float]]:
    """Coloured KiB per token: query and output exchange, then what represents K and V."""
    total = port_elements(scheme, DIMS, 1, RANKS, degree)
    head_dims = DIMS.qk_head_dim + DIMS.v_head_dim
    exchanged = DIMS.num_heads * head_dims * (degree - 1) / degree
    colour = KV_COLOUR if scheme == "explicit" else LATENT_COLOUR
    return [(QUERY_COLOUR, exchanged * 2 / 1024), (colour, (total - exchanged) * 2 / 1024)]


def bar(y: int, name: str, scheme: str, degree: int, words: str, scale: float) -> str:
    x, boxes = LABEL, []
    for colour, size in parts(scheme, degree):
        width = min(size * scale, BAR - (x - LABEL))
        if width > 0:
            boxes.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" rx="2" fill="{colour}"/>')
        x += width
    size = sum(size for _, size in parts(scheme, degree))
    cut = size * scale > BAR
    number = f"{size:,.1f} KiB" + (" (bar cut)" if cut else "")
    where = f'x="{LABEL + BAR + 10}"'
    return (
        f'<text x="{LABEL - 10}" y="{y + 15}" text-anchor="end" class="b">{name}</text>{"".join(boxes)}'
        f'<text {where} y="{y + 15}" class="b">{number}</text>'
        f'<text x="{LABEL}" y="{y + 35}" class="s">{words}</text>'
    )


def key(x: int, colour: str, words: str) -> str:
    return (
        f'<rect x="{x}" y="42" width="12" height="12" rx="2" fill="{colour}"/><text x="{x + 18}" y="52">{words}</text>'
    )


def main() -> None:
    scale = BAR / 160  # KiB to pixels; explicit at U=1 does not fit and is cut
    height = TOP + LINE * len(ROWS) + 8
    body = [bar(TOP + LINE * i, *row, scale) for i, row in enumerate(ROWS)]
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="sans-serif" font-size="13">'
        "<style>text{fill:#24292f}.b{font-weight:600}.s{font-size:11.5px;fill:#57606a}</style>"
        f'<rect width="720" height="{height}" fill="#ffffff"/>'
        '<text x="12" y="26" class="b" font-size="16">What each rank sends per token and layer, forward '
        f"(DeepSeek-V3, {RANKS} ranks, bf16)</text>"
        + key(LABEL, QUERY_COLOUR, "queries and outputs")
        + key(LABEL + 170, KV_COLOUR, "keys and values")
        + key(LABEL + 310, LATENT_COLOUR, "latents")
        + "".join(body)
        + "</svg>\n"
    )
    Path(__file__).with_name("wire.svg").write_text(svg)


if __name__ == "__main__":
    main()
