"""What figures share: a figure with alternative text, axes, a legend, notes, captions, colours."""

import io
import textwrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, FigureBase
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import MaxNLocator

# Okabe & Ito's colours, which colour-blind readers can tell apart: https://jfly.uni-koeln.de/color
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#7A7A7A"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, GREY)  # red is kept for what needs attention
WIDTH, DPI, SMALL = 10, 100, 9
CHARACTER = 0.072  # inches, width of an average character of the SMALL font


class DescribedFigure(Figure):
    """A matplotlib Figure with `alt_text`, which Jupyter stores beside the image.

    The notebook gets it as the output's `metadata["image/png"]["alt"]`, the key that IPython and nbconvert use, and as
    its plain text, for viewers that show no images. `height`, `width`: inches.
    """

    alt_text = ""

    def __init__(self, height: float, width: float = WIDTH):
        super().__init__(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(self)  # not through pyplot, which would draw every open figure a second time

    def described(self, text: str) -> "DescribedFigure":
        """This figure, with an alternative text."""
        self.alt_text = " ".join(text.split())
        return self

    def _repr_mimebundle_(self, include=None, exclude=None):
        png = io.BytesIO()
        self.savefig(png, format="png", bbox_inches="tight")
        return {"image/png": png.getvalue(), "text/plain": self.alt_text}, {"image/png": {"alt": self.alt_text}}


def panels(fig: FigureBase, *shape: int, grid: str = "y", **options: Any) -> Any:
    """Axes with a light grid and no frame on the right and top: one, or an array of them in a given `shape`."""
    made = fig.subplots(*shape, **options)
    for ax in np.atleast_1d(made).flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis=grid, color="0.9")
        ax.set_axisbelow(True)
    return made


def label_steps(ax: Axes, label: str, most_ticks: int = 10) -> None:
    """Label axes whose x is a run's step. Steps may have six digits: a third of a figure has room for four ticks."""
    ax.set(xlabel="step", ylabel=label)
    ax.xaxis.set_major_locator(MaxNLocator(most_ticks, integer=True))


def add_legend(target: Axes | Figure, **where: Any) -> None:
    target.legend(frameon=False, fontsize=SMALL, **where)


def add_note(ax: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Write a small text beside a point, at an `offset` in typographic points."""
    ax.annotate(text, point, offset, textcoords="offset points", fontsize=SMALL, parse_math=False, **style)


def show_image(ax: Axes, image: Any) -> None:
    """Show an image without ticks and frame."""
    ax.imshow(np.asarray(image), cmap="gray")  # cmap: for images of one channel
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def wrap(text: str, inches: float, lines: int) -> str:
    """`text` in lines of the SMALL font, of a width in inches, cut after a number of `lines`."""
    text = str(text)
    if not text.isascii():  # captions come in all scripts; a glyph that the font lacks would cause a warning
        known = get_font(findfont(FontProperties())).get_charmap()
        text = "".join(c if ord(c) in known else "□" for c in text)
    width = max(8, int(inches / CHARACTER))
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …"))
