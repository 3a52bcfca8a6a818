"""A box to type a prompt into: it draws from a finished run's pipeline, in this process.

prompt_box.PromptBox(config)  # the last line of a cell
"""

from __future__ import annotations

import html

import ipywidgets as widgets
import numpy as np

from .. import storage
from ..config import TrainingConfig
from ..notebook import printable
from ..sample import generate
from .generation import load_pipeline
from .side_by_side import enlarged_png


class PromptBox(widgets.VBox):
    """Draws an image of what is typed, and of the same prompt from other noise.

    `sampling`: steps and guidance_scale, as for `sample.generate`. Raises FileNotFoundError if the run has no pipeline
    yet.
    """

    def __init__(self, config: TrainingConfig, **sampling: float):
        super().__init__()
        self.config, self.uri, self.seed = config, storage.join(config.run_uri, "pipeline"), 0
        self.sampling = sampling
        if not storage.exists(self.uri):
            raise FileNotFoundError(
                f"run_name={config.run_name!r} has no pipeline in {self.uri}: run the cells that train it and the cell "
                'below "Use it", which exports it.'
            )
        self.pipeline = load_pipeline(self.uri)
        options = dict(placeholder="a prompt, then Enter", continuous_update=False, layout={"width": "50em"})
        self.text = widgets.Text(description="Prompt", **options)
        self.again = widgets.Button(description="Other noise")
        self.said = widgets.HTML()
        self.shown = widgets.Image(format="png", layout={"display": "none", "width": "320px"})
        self.text.observe(self.show, "value")
        self.again.on_click(self.show_another)
        self.children = [widgets.HBox([self.text, self.again]), self.said, self.shown]

    def draw(self, prompt: str, seed: int = 0) -> np.ndarray:
        """(H, W, 3) uint8."""
        resolution = self.config.largest_resolution
        (picture,) = generate(self.pipeline, [prompt], resolution=resolution, seed=seed, **self.sampling)
        return picture

    def show(self, _=None) -> None:
        prompt = self.text.value.strip()
        if not prompt:
            self.said.value = "The prompt is empty: type what the image should show."
            return
        self.said.value = "drawing"
        self.shown.value, self.shown.layout.display = enlarged_png(self.draw(prompt, self.seed)), "block"
        self.said.value = html.escape(printable(prompt))

    def show_another(self, _) -> None:
        self.seed += 1
        self.show()
