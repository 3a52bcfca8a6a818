"""The notebooks' parameters, and the check of their `sections`. See `parameters` for what is checked, and how."""

from collections.abc import Sequence

from .preprocessing import OnlineConfig, PreprocessingConfig, pool_size
from .training import TrainingConfig

__all__ = ["OnlineConfig", "PreprocessingConfig", "TrainingConfig", "check_sections", "pool_size"]


def check_sections(sections: Sequence[str], known: Sequence[str]) -> None:
    """Raises ValueError if `sections` names one that the notebook does not have."""
    choices = ", ".join(map(repr, known))
    if not isinstance(sections, (list, tuple)):
        raise ValueError(f"sections={sections!r} must be a list of {choices}, or [] for the main lesson alone.")
    for section in sections:
        if section not in known:
            raise ValueError(f"sections={section!r} is unknown: choose one of {choices}.")
