"""How a run's checkpoints are evaluated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ...config import TrainingConfig

Agreement = Callable[[list[np.ndarray], list[str]], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How a run's checkpoints are evaluated. The tasks that evaluate them are given this object.

    Args:
        config: `guidance_scale`, `sampling_steps`, `sampler`, `clip_model` and `best_by` are used.
        prompts: None: captions of held-out rows.
        agreement: `agreement(images, prompts)` returns the share of images that show what their prompt says, as "all"
            and by attribute, for data whose images a program can judge. None: not measured.
    """

    config: TrainingConfig
    prompts: list[str] | None = None
    agreement: Agreement | None = None
