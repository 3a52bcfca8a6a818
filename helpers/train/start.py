"""Derives a run's config, checks it before anything starts, and writes the run's `config.json`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .. import storage
from ..config import TrainingConfig, refuse_change
from ..encode import models
from ..latents.manifest import DataSets
from ..latents.plan import plan_run
from ..model import denoisers
from . import checkpoint, metrics, run_folder

SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's own list of checkpoints
SNAPSHOT_SHAPE = {"checkpoint_results": [{"checkpoint_dir_name": str}]}
PACKAGES = ("ray", "torch", "diffusers", "transformers", "pyarrow", "numpy")
Check = Callable[[TrainingConfig, DataSets], Iterable[str]]  # sentences about what does not fit


# ---- derive


def training_config(parameters: dict[str, Any]) -> TrainingConfig:
    """The config from a notebook's variables. The earlier run of this name supplies values that they leave open.

    `units_per_step=None` becomes the number of the earlier run, so that a run goes on with any number of workers.
    `init_from` gets a commit or a step (`pin_weights`). Raises ValueError if a fixed parameter differs from
    the earlier run's (`check_resume`), before data is looked at.
    """
    location = {name: parameters.get(name) for name in ("storage", "run_name")}
    earlier = read_earlier(TrainingConfig.from_parameters(location))
    begun = earlier["parameters"] if earlier else {}
    units = parameters["units_per_step"] or begun.get("units_per_step")
    config = TrainingConfig.from_parameters(parameters, units_per_step=units)
    if config.init_from:
        runs_uri = storage.join(config.storage, "runs")
        pinned = pin_weights(config.init_from, begun.get("init_from"), runs_uri)
        config = dataclasses.replace(config, init_from=pinned)
    if earlier:
        check_resume(config, begun, earlier.get("denoiser"))
    return config


def read_earlier(config: TrainingConfig) -> dict[str, Any] | None:
    """`config.json` of the run of this name; None if it has taken no step."""
    uri = storage.join(config.run_uri, "config.json")
    begun = storage.exists(uri) and metrics.metrics_files(config.run_uri)
    return read_config(config.run_uri) if begun else None


def read_config(run_uri: str) -> dict[str, Any]:
    """`config.json` of a run."""
    remedy = "delete it and train with the parameters that this run began with, which writes it again and resumes"
    return storage.read_json(storage.join(run_uri, "config.json"), remedy, shape={"parameters": dict})


def pin_weights(given: str, earlier: str | None, runs_uri: str) -> str:
    """`init_from` with its commit on the hub, or with the step of its run's newest checkpoint; else as it is.

    `earlier`: what was pinned when the run began. It is kept unless `given` names another revision or step.
    """
    if checkpoint.is_hub_id(given):
        return models.pin_model(given, earlier, "init_from")
    uri, step = run_folder.find_run(given, runs_uri)
    if step is None and earlier and earlier.startswith(f"{uri}@"):
        return earlier
    if not run_folder.list_checkpoints(uri):
        return given
    return f"{uri}@{run_folder.step_of(run_folder.find_checkpoint(given, runs_uri))}"


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
    divisor, width = adapter.divisor(denoiser), denoiser[adapter.text_width]
    for uri, manifest in data.manifests.items():
        columns = [latents for resolution in config.resolutions for latents in manifest.latents_at(resolution)]
        sizes = [("captions {} wide", width, manifest.embeddings.shape[-1], manifest.text_encoder_model)]
        if columns:
            sizes.append(("{} latent channels", denoiser["in_channels"], columns[0].shape[1], manifest.vae_model))
        for what, taken, held, model in sizes:
            if taken != held:
                yield (
                    f"{which} takes {what.format(taken)}, and {uri} holds {what.format(held)} "
                    f"(encoder_model={model!r}): choose a denoiser and an encoder that belong together."
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


def check_resume(config: TrainingConfig, begun: dict[str, Any], denoiser: dict[str, Any] | None = None) -> None:
    """Raises ValueError, naming the parameter, if a fixed one differs from `begun`, the run's parameters so far.

    With a constant learning rate, `max_steps` may grow, as no earlier step depends on it.

    `denoiser`: the configuration that the run began with, of which its `unet_config` names the file; None: not known.
    """
    now = config.fixed("rows", "latents", "run")
    if config.lr_schedule == "constant" and config.max_steps > begun.get("max_steps", config.max_steps):
        begun = {**begun, "max_steps": config.max_steps}
    what, remedy = f"run_name={config.run_name!r}", "set it back to resume the run, or give another run_name"
    refuse_change(what, begun, now, remedy, names=now)
    if denoiser is not None:
        found, what = (
            denoisers.load_denoiser_config(config.unet_config),
            f"{what} with unet_config={config.unet_config!r}",
        )
        refuse_change(what, denoiser, found, "restore that file, or give another run_name")


def check_same_data(config: TrainingConfig, before: list[dict], now: list[dict]) -> None:
    """Raises ValueError if a run's data has changed since it was begun; both as `describe_data` returns them."""
    what, remedy = f"run_name={config.run_name!r}", "set it back to resume the run, or give another run_name"
    refuse_change(what, {"data sets": len(before)}, {"data sets": len(now)}, remedy)
    for uri, *both in zip(config.proportions, before, now, strict=True):
        refuse_change(f"{what} on {uri}", *({**data["made_with"], **data} for data in both), remedy)


# ---- open


def open_run(
    config: TrainingConfig, checks: Sequence[Check] = CHECKS, guard: Callable[[], None] = lambda: None
) -> DataSets:
    """Check a run and prepare it for `trainer.fit()`; returns the data sets that it trains on.

    Deletes unusable checkpoints and prints which. Writes `config.json`.

    Args:
        checks: see `refuse`.
        guard: called before anything is changed; raises if another driver uses the run.

    Raises ValueError for what the checks find, and if a fixed parameter or the data of an earlier run has changed.
    """
    data = DataSets.open(config.proportions)
    refuse(config, data, checks)
    described = describe_data(data)
    if earlier := read_earlier(config):
        check_resume(config, earlier["parameters"], earlier.get("denoiser"))
        check_same_data(config, earlier["data"], described)
    guard()
    for sentence in reconcile_checkpoints(config.run_uri):
        print(sentence)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    content = {
        "parameters": config.to_dict(),
        "denoiser": denoisers.load_denoiser_config(config.unet_config),
        "data": described,
        "versions": {"python": platform.python_version(), **versions},
    }
    storage.write_json(storage.join(config.run_uri, "config.json"), content)
    return data


def reconcile_checkpoints(run_uri: str) -> list[str]:
    """Delete the checkpoints, and Ray Train's list of them, that the next attempt cannot use.

    Returns sentences about the damaged checkpoints.

    Ray Train fails to start if it cannot read its list of checkpoints, or if the list names a missing folder. Without a
    list it starts a new one. So a list that disagrees with the storage is deleted. Damaged folders, and older folders
    that the list does not name, are deleted too. The newest intact checkpoint is found first, by its bytes, and kept,
    because the run resumes from it. Call `reconcile_checkpoints` while nothing trains under this name.
    """
    resume_from, problems = run_folder.last_sound(run_uri)
    listed, snapshot_uri = [], storage.join(run_uri, SNAPSHOT)
    try:
        results = storage.read_json(snapshot_uri, shape=SNAPSHOT_SHAPE)["checkpoint_results"]
        listed = [result["checkpoint_dir_name"] for result in results]
    except FileNotFoundError:
        pass
    except storage.DamagedFile:  # the driver was killed while Ray Train wrote it
        storage.delete(snapshot_uri)
        problems[SNAPSHOT] = "it was cut short, and Ray Train starts a new list"
    folders = {storage.name(uri): uri for uri in run_folder.list_checkpoints(run_uri)}
    unusable = {name: "its folder is missing" for name in listed if name not in folders}
    for name, uri in folders.items():
        with contextlib.suppress(OSError):  # `run_folder.last_sound` has named it
            if why := run_folder.find_corruption(uri):
                unusable[name] = why
    if not unusable.keys().isdisjoint(listed):
        storage.delete(snapshot_uri)
    names = list(folders)  # newest first
    older = names[names.index(storage.name(resume_from)) + 1 :] if resume_from else []
    for name in {*unusable.keys() & folders.keys(), *set(older).difference(listed)}:
        storage.delete(folders[name])
    return run_folder.describe_problems(unusable | problems, resume_from)


def describe_data(data: DataSets) -> list[dict]:
    """What a run depends on, one dict for each data set: encoder, files in order with their row groups, proportion."""
    names = ("encoder", "scaling_factor", "shift_factor", "written", "files_crc32", "made_with")
    return [
        {"proportion": data.proportions[uri], **{name: getattr(manifest, name) for name in names}}
        for uri, manifest in data.manifests.items()
    ]
