"""What may join the training loop without being part of it. No PyTorch: Ray's own processes load extras too."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..config import TrainingConfig
    from ..latents.manifest import Manifest
    from .loop import Run
    from .step import AuxiliaryLoss, Unit


class Hook(contextlib.AbstractContextManager):
    """What an extra does on a worker while it trains. All ranks call all methods. Override what is needed."""

    def __exit__(self, *_: Any) -> None:
        """Called when training ends, with or without an error."""

    def before_step(self, step: int, units: list[Unit]) -> None:
        """`step`: steps done; `units`: this worker's part of the global batch."""

    def after_step(self, step: int, units: list[Unit], record: dict[str, Any]) -> None:
        """`step`: steps done; `record`: the step's line of metrics, which may get more entries."""

    def wants_checkpoint(self, step: int) -> bool:
        """Whether to save a checkpoint after `step` steps. All ranks must return the same."""
        return False

    def before_checkpoint(self, step: int) -> dict[str, Any]:
        """Arguments for `ray.train.report`, such as `validation`."""
        return {}


class Extra:
    """The settings of an extra: a frozen dataclass whose fields are its arguments. It is pickled to the workers."""

    def check(self, run_uri: str, device: torch.device) -> str | None:
        """Why this worker must end before the model is built; None if it may train. Called on all ranks."""
        return None

    def auxiliary_losses(self, config: TrainingConfig, manifest: Manifest) -> list[AuxiliaryLoss]:
        """Losses that are trained beside the denoiser's. Called on all ranks, before the model is built."""
        return []

    def __call__(self, run: Run) -> contextlib.AbstractContextManager[Hook]:
        """This extra's hook on a worker of a run."""
        return Hook()

    def trainer_options(self, config: TrainingConfig) -> dict[str, Any]:
        """What the driver's `TorchTrainer` needs; {} if nothing.

        "callbacks" (a list), "validation_config", "failure_config" ({field of Ray Train's `FailureConfig`: value}).
        """
        return {}

    def on_driver(self, config: TrainingConfig) -> contextlib.AbstractContextManager:
        """Entered on the driver around `trainer.fit()`.

        It yields None, or `track(step, values)`, which gets the numbers and images of each step and evaluation.
        """
        return contextlib.nullcontext()
