"""Derives a run's config, checks it before anything starts, and writes the run's `config.json`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from .. import storage
from ..config import TrainingConfig, refuse_change
from ..encode import models
from ..latents.manifest import DataSets
from ..latents.plan import Plan, plan_run
from ..model import denoisers
from . import checkpoint, metrics, run_folder

PACKAGES = ("ray", "torch", "diffusers", "transformers", "pyarrow", "numpy")
Check = Callable[[TrainingConfig, DataSets], Iterable[str]]  # sentences about what does not fit


class Guard(Protocol):
    def check(self) -> None:
        """Raises if another driver uses the run."""


# ---- derive


def training_config(parameters: dict[str, Any]) -> TrainingConfig:
    """The config from a notebook's variables. The earlier run of this name supplies values that they leave open.

    `units_per_step=None` becomes the number of the earlier run, so that a run goes on with any number of workers.
    `init_from` gets the commit of a hub model (`models.pin_model`). Raises ValueError if a fixed parameter differs from
    the earlier run's (`check_resume`), before data is looked at.
    """
    earlier = read_earlier(TrainingConfig(**{name: parameters.get(name) for name in ("storage", "run_name")}))
    begun = earlier["parameters"] if earlier else {}
    units = parameters["units_per_step"] or begun.get("units_per_step")
    config = TrainingConfig.from_parameters(parameters, units_per_step=units)
    if config.init_from and checkpoint.is_hub_id(config.init_from):
        pinned = models.pin_model(config.init_from, begun.get("init_from"), "init_from")
        config = dataclasses.replace(config, init_from=pinned)
    if earlier:
        check_resume(config, begun)
    return config


def read_earlier(config: TrainingConfig) -> dict[str, Any] | None:
    """`config.json` of the run of this name; None if it has taken no step."""
    uri = storage.join(config.run_uri, "config.json")
    begun = storage.exists(uri) and metrics.metrics_files(config.run_uri)
    return read_config(config.run_uri) if begun else None


def read_config(run_uri: str) -> dict[str, Any]:
    """`config.json` of a run."""
    remedy = "delete it and train with the parameters that this run began with, which writes it again and resumes"
    return storage.read_json(storage.join(run_uri, "config.json"), remedy)


def run_location(config: TrainingConfig) -> dict[str, Any]:
    """`ray.train.RunConfig`'s arguments for a run's location, on any store that `storage` opens."""
    filesystem, path = storage.open_filesystem(storage.join(config.storage, "runs"))
    return {"name": config.run_name, "storage_path": path, "storage_filesystem": filesystem}


# ---- check


def columns_fit(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence for each resolution that a data set lacks."""
    for uri, manifest in data.manifests.items():
        for resolution in config.resolutions:
            if resolution not in manifest.resolutions:
                yield (
                    f"resolution={resolution} is not in {uri}, which holds "
                    f"{', '.join(map(str, manifest.resolutions))}: choose one of these, or encode the data again with "
                    "it."
                )
            elif manifest.rows_at(resolution) == 0:
                yield f"resolution={resolution}: none of the images of {uri} is as large: choose a smaller one."


def widths_fit(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence for each dimension of captions and latents that the denoiser does not take."""
    denoiser = denoisers.load_denoiser_config(config.unet_config)
    adapter, which = denoisers.ADAPTERS[denoiser["_class_name"]], f"unet_config={config.unet_config!r}"
    divisor, width = adapter.divisor(denoiser), adapter.caption_width(denoiser)
    for uri, manifest in data.manifests.items():
        if width != manifest.embeddings.shape[-1]:
            yield (
                f"{which} takes captions {width} wide, and {uri} holds captions {manifest.embeddings.shape[-1]} wide "
                f"(encoder_model={manifest.text_encoder_model!r}): choose a denoiser and an encoder that belong "
                "together."
            )
        columns = [latents for resolution in config.resolutions for latents in manifest.latents_at(resolution)]
        if columns and denoiser["in_channels"] != columns[0].shape[1]:
            yield (
                f"{which} takes {denoiser['in_channels']} latent channels, and {uri} holds {columns[0].shape[1]} "
                f"(encoder_model={manifest.vae_model!r}): choose ones that belong together."
            )
        for latents in columns:
            height, side = latents.shape[2:]
            if height % divisor or side % divisor:
                yield (
                    f"resolution={latents.resolution} makes latents of {side} x {height}, and {which} takes "
                    f"sides that are multiples of {divisor}: encode the data with resolutions that are multiples of "
                    f"{latents.size[0] // side * divisor}, and with this unet_config."
                )


def plan_is_filled(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence if the rows do not fill one step."""
    try:
        plan_run(data, config)
    except ValueError as error:
        yield str(error)


CHECKS: Sequence[Check] = (columns_fit, widths_fit, plan_is_filled)


def refuse(config: TrainingConfig, data: DataSets, checks: Sequence[Check]) -> None:
    """Raises ValueError with the sentences of the first check that finds something."""
    for check in checks:
        if problems := list(check(config, data)):
            raise ValueError(" ".join(problems))


def check_resume(config: TrainingConfig, begun: dict[str, Any]) -> None:
    """Raises ValueError, naming the parameter, if a fixed one differs from `begun`, the run's parameters so far.

    With a constant learning rate, `max_steps` may grow, as no earlier step depends on it.
    """
    now = config.fixed("rows", "latents", "run")
    if config.lr_schedule == "constant" and config.max_steps > begun.get("max_steps", config.max_steps):
        begun = {**begun, "max_steps": config.max_steps}
    remedy = "set it back to resume the run, or give another run_name"
    refuse_change(f"run_name={config.run_name!r}", begun, now, remedy, names=now)


def check_same_data(config: TrainingConfig, before: list[dict], now: list[dict]) -> None:
    """Raises ValueError if a run's data has changed since it was begun; both as `describe_data` returns them."""
    what, remedy = f"run_name={config.run_name!r}", "set it back to resume the run, or give another run_name"
    refuse_change(what, {"data sets": len(before)}, {"data sets": len(now)}, remedy)
    for uri, *both in zip(config.proportions, before, now, strict=True):
        refuse_change(f"{what} on {uri}", *({**data["made_with"], **data} for data in both), remedy)


# ---- open


def open_run(config: TrainingConfig, checks: Sequence[Check] = CHECKS, guard: Guard | None = None) -> DataSets:
    """Check a run and prepare it for `trainer.fit()`; returns the data sets that it trains on.

    Deletes unusable checkpoints and prints which. Writes `config.json`.

    Args:
        checks: see `refuse`.
        guard: asked before anything is changed; None: nobody else trains under this name.

    Raises ValueError for what the checks find, and if a fixed parameter or the data of an earlier run has changed.
    """
    data = DataSets.open(config.proportions)
    refuse(config, data, checks)
    described = describe_data(data)
    if earlier := read_earlier(config):
        check_resume(config, earlier["parameters"])
        check_same_data(config, earlier["data"], described)
    if guard:
        guard.check()
    for sentence in run_folder.reconcile_checkpoints(config.run_uri):
        print(sentence)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    content = {
        "parameters": config.to_dict(),
        "data": described,
        "shapes": describe_shapes(plan_run(data, config)),
        "versions": {"python": platform.python_version(), **versions},
        "git_revision": git_revision(),
    }
    storage.write_json(storage.join(config.run_uri, "config.json"), content)
    return data


def describe_data(data: DataSets) -> list[dict]:
    """What a run depends on, one dict for each data set: encoder, files in order with their row groups, proportion."""
    names = ("encoder", "scaling_factor", "shift_factor", "written", "files_crc32", "made_with")
    return [
        {"proportion": data.proportions[uri], **{name: getattr(manifest, name) for name in names}}
        for uri, manifest in data.manifests.items()
    ]


def describe_shapes(plan: Plan) -> list[dict]:
    """One dict for each shape: {"shape": images' size, "rows", "steps" per epoch, "left_over": rows not used}."""
    return [
        {
            "shape": "x".join(map(str, shape.latents.size)),
            "rows": shape.num_rows,
            "steps": int(steps),
            "left_over": shape.num_rows - int(steps) * plan.batch_rows,
        }
        for shape, steps in zip(plan.shapes, plan.shape_steps, strict=True)
    ]


def git_revision() -> str | None:
    """The commit of the current folder; None outside of a repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
