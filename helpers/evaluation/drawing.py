"""Shared by the figures of evaluation and of the lessons: a figure with alternative text, colours, captions."""

import io
import textwrap

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

# Okabe & Ito's colours, which colour-blind readers can tell apart: https://jfly.uni-koeln.de/color
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#7A7A7A"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, GREY)  # red is kept for what needs attention
WIDTH, DPI, SMALL = 10, 100, 9
CHARACTER = 0.072  # inches, width of an average character of the SMALL font
LINE = 0.16  # inches, height of a line of that font


class DescribedFigure(Figure):
    """A matplotlib Figure with `alt_text`, which Jupyter stores beside the picture.

    The notebook gets it as the output's `metadata["image/png"]["alt"]`, the key that IPython and nbconvert use, and as
    its plain text, for viewers that show no pictures.
    """

    alt_text = ""

    def __init__(self, height, width=WIDTH, layout="constrained"):
        super().__init__(figsize=(width, height), dpi=DPI, layout=layout)
        FigureCanvasAgg(self)  # not through pyplot, which would draw every open figure a second time

    def described(self, text):
        self.alt_text = " ".join(text.split())
        return self

    def _repr_mimebundle_(self, include=None, exclude=None):
        png = io.BytesIO()
        self.savefig(png, format="png", bbox_inches="tight")
        return {"image/png": png.getvalue(), "text/plain": self.alt_text}, {"image/png": {"alt": self.alt_text}}


def axes(fig, *shape, grid="y", **options):
    """Axes with a light grid and no frame on the right and top: one, or an array of them in a given `shape`."""
    made = fig.subplots(*shape, **options)
    for ax in np.atleast_1d(made).flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis=grid, color="0.9")
        ax.set_axisbelow(True)
    return made


def wrap(text, inches, lines):
    text = str(text)
    if not text.isascii():  # captions come in all scripts; a glyph that the font lacks would cause a warning
        known = get_font(findfont(FontProperties())).get_charmap()
        text = "".join(c if ord(c) in known else "□" for c in text)
    width = max(8, int(inches / CHARACTER))
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …"))


def show(ax, picture, **how):
    ax.imshow(np.asarray(picture), cmap="gray", **how)  # cmap: for pictures of one channel
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def aspect(pictures):
    """Height over width of the tallest picture, clipped to what a row of a grid can show."""
    shapes = [np.asarray(picture).shape for picture in pictures]
    return float(np.clip(max(height / width for height, width, *_ in shapes), 0.3, 2))


def listed(texts, most=12):
    texts = list(dict.fromkeys(str(text) for text in texts))
    return "; ".join(texts[:most]) + (f"; and {len(texts) - most} more" if len(texts) > most else "")
