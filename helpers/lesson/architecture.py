"""The diagram of the pipeline in README and notebooks: `architecture.svg`, which this module draws.

python -m helpers.lesson.architecture
"""

import pathlib

FILE = str(pathlib.Path(__file__).with_suffix(".svg"))
GREY, SKY, ORANGE, GREEN, BLUE, PURPLE = "#7A7A7A", "#56B4E9", "#E69F00", "#009E73", "#0072B2", "#CC79A7"
TITLE = (
    "Diagram: CPU tasks transform raw pictures and captions, encoder actors turn them into latents, and training "
    "workers train the U-Net on the latents, which are stored in between (offline) or streamed (online)."
)
# left edge, colour, title, what it does, where, number of cards in the pile, what flows on to the next box
BOXES = [
    (20, GREY, "Raw data", ("images and", "captions"), ("local", "or s3://"), 1, ("rows",)),
    (186, SKY, "Transform", ("decode, crop", "resize", "tokenise"), ("tasks", "on CPUs"), 3, ("pixels", "tokens")),
    (352, ORANGE, "Encode", ("VAE and", "text encoder"), ("actors on", "small GPUs"), 3, ("latents", "text")),
    (528, GREEN, "Latents", ("Parquet and", "manifest"), ("local", "or s3://"), 1, ("batches",)),
    (694, BLUE, "Train", ("U-Net only",), ("workers on", "large GPUs"), 3, ("EMA",)),
    (860, PURPLE, "Sample", ("prompts to", "pictures"), ("diffusers", "pipeline"), 1, ()),
]
WIDE, TOP, TALL, CARD = 104, 80, 180, 5  # of a box, in units of the drawing
ARROW = 'fill="none" stroke="#444" stroke-width="1.8" marker-end="url(#arrowhead)"'


def text(x: float, y: float, lines: tuple[str, ...], style: str = "") -> str:
    """Lines of centred text, the first on the baseline `y`."""
    return "\n".join(f'<text x="{x}" y="{y + 17 * i}" {style}>{line}</text>' for i, line in enumerate(lines))


def box(left: int, color: str, title: str, does: tuple, where: tuple, cards: int, flow: tuple, following: int) -> str:
    """A pile of cards with a coloured head, and the arrow to the box whose left edge is at `following`."""
    middle, parts = left + WIDE / 2, []
    for behind in reversed(range(cards)):
        place = f'x="{left + CARD * behind}" y="{TOP - CARD * behind}" width="{WIDE}" height="{TALL}" rx="8"'
        parts.append(f'<rect {place} fill="white" stroke="{color}" stroke-width="1.6"/>')
    parts.append(f'<rect x="{left}" y="{TOP}" width="{WIDE}" height="36" rx="8" fill="{color}"/>')
    parts.append(text(middle, TOP + 24, (title,), 'font-size="15" font-weight="bold" fill="white"'))
    parts += [text(middle, TOP + 68, does), text(middle, TOP + 142, where, 'font-weight="bold"')]
    if flow:
        start, end = left + WIDE + CARD * (cards - 1) + 3, following - 4
        parts.append(f'<path d="M{start} {TOP + 100}H{end}" {ARROW}/>')
        parts.append(text((start + end) / 2, TOP + 92 - 15 * (len(flow) - 1), flow, 'font-size="12"'))
    return "\n".join(parts)


def band(left: int, right: int, label: str) -> str:
    """A shaded field behind some boxes, with its name."""
    place = f'x="{left}" y="62" width="{right - left}" height="232" rx="10"'
    style = 'font-size="16" font-weight="bold"'
    return f'<rect {place} fill="#F0F0F0"/>\n' + text((left + right) / 2, 282, (label,), style)


def svg() -> str:
    """The diagram."""
    lefts = [values[0] for values in BOXES]
    around = f"M{352 + WIDE / 2} 68V30H{694 + WIDE / 2}V66"
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 984 304" role="img" font-family="sans-serif"'
        ' font-size="13" text-anchor="middle" fill="#222">',
        f"<title>{TITLE}</title>",
        '<defs><marker id="arrowhead" viewBox="0 0 8 8" refX="7" refY="4" orient="auto"'
        ' markerWidth="6" markerHeight="6"><path d="M0 0L8 4L0 8z" fill="#444"/></marker></defs>',
        '<rect width="984" height="304" fill="white"/>',
        band(8, 472, "Preprocessing: Ray Data"),
        band(682, 976, "Training: Ray Train"),
        f'<path d="{around}" {ARROW} stroke-dasharray="6 4"/>',
        text(580, 22, ("online: straight to the trainers, nothing stored",)),
        text(580, 64, ("offline: stored",)),
        *(box(*values, following) for values, following in zip(BOXES, [*lefts[1:], 0], strict=True)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    pathlib.Path(FILE).write_text(svg())
