"""Checks a training run before anything starts, and writes its `config.json`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from .. import storage
from ..config import TrainingConfig, first_difference
from ..distributed import COMPILED_SHAPES
from ..encode import models
from ..latents.manifest import MANIFEST, MEND, DataSets, Manifest, read_manifest, read_segments
from ..latents.plan import Plan, plan_run
from ..model import denoisers
from ..model.denoisers import load_denoiser_config
from ..production import lease
from ..production.data import exclusions
from . import checkpoint, metrics, resume, start, weights

SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's own list of checkpoints
LISTED_ROWS = 10**8  # a larger data set's files are not listed before a run: they are checked when they are read
PACKAGES = ("ray", "torch", "diffusers", "transformers", "pyarrow", "numpy")


def run_folder(config: TrainingConfig) -> dict[str, Any]:
    """`ray.train.RunConfig`'s arguments for a run's location, on any store that `storage` opens."""
    filesystem, path = storage.open_filesystem(storage.join(config.storage, "runs"))
    return {"name": config.run_name, "storage_path": path, "storage_filesystem": filesystem}


def training_config(parameters: dict[str, Any]) -> TrainingConfig:
    """The config from a notebook's variables. The earlier run of this name supplies values that they leave open.

    `units_per_step=None` becomes the number of the earlier run, or of the run that `continue_from` names, so that a run
    goes on with any number of workers. `continue_from` gets a step if it names none (`start.pin_run`). `init_from` and
    `clip_model` get the commits of hub models (`models.pin_model`). So one CLIP computes all scores of a run.
    `leave_out` gets the list's SHA-256 (`exclusions.pin`). Raises ValueError if a fixed parameter differs from the
    earlier run's (`check_resume`), before data is looked at.
    """
    named = {name: parameters.get(name) for name in ("storage", "run_name", "continue_from")}
    earlier = read_earlier(TrainingConfig(**named))
    begun = earlier["parameters"] if earlier else {}
    units = parameters["units_per_step"] or begun.get("units_per_step")
    if not (units or begun) and named["continue_from"]:
        units = start.units_to_keep(TrainingConfig(**named), parameters.get("global_batch_size"))
    config = TrainingConfig.from_parameters({**parameters, "units_per_step": units})
    pinned = {"leave_out": exclusions.pin(config.leave_out)}
    if config.continue_from:
        pinned["continue_from"] = start.pin_run(config, begun.get("continue_from"))
    if config.init_from and weights.on_hub(config.init_from):
        pinned["init_from"] = models.pin_model(config.init_from, begun.get("init_from"), "init_from")
    if config.validate_every and config.clip_model:
        pinned["clip_model"] = models.pin_model(config.clip_model, begun.get("clip_model"), "clip_model")
    config = dataclasses.replace(config, **pinned)
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


def open_run(config: TrainingConfig) -> DataSets:
    """Check a run and prepare it for `trainer.fit()`; returns the data sets that it trains on.

    Deletes unusable checkpoints and prints which. Writes `config.json`. Sets the time after which Ray Train gives up on
    a worker that does not answer. This process holds the run's lease until it or `monitor.monitor_run` ends.

    Errors come before anything is changed:
        - What `check_run` and `start.check_start` raise.
        - ValueError for a latents file that is missing or cut short (`check_files`).
        - ValueError for a `leave_out` that lists no row (`check_leave_out`).
        - RuntimeError if another driver holds the run.
    """
    data = DataSets.open(config.proportions)
    shapes = describe_shapes(check_run(config, data))
    for sentence in start.check_start(config, describe_data(data)):
        print(sentence)
    for uri, manifest in data.manifests.items():
        if not manifest.online and manifest.written <= LISTED_ROWS:
            check_files(uri)
        share = manifest.job["validation_share"]
        if config.validation_share not in (0, share):
            print(f"validation_share={config.validation_share} is not used: {uri} was encoded with {share}.")
    for shape in shapes:
        if not shape["steps"]:
            print(
                f"Pictures of {shape['shape']} are left out: their {shape['rows']} rows do not fill a batch of "
                f"{config.global_batch_size}."
            )
    if config.leave_out:
        check_leave_out(config, data)
    if config.compile_unet and len(shapes) > COMPILED_SHAPES:
        print(
            f"compile_unet=True compiles for {COMPILED_SHAPES} shapes, and the data has {len(shapes)}: later shapes "
            "run as without it. Encode with fewer aspect_ratios."
        )
    lease.hold(config.run_uri, f"run_name={config.run_name!r}")
    for sentence in reconcile_checkpoints(config.run_uri):
        print(sentence)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    content = {
        "parameters": config.to_dict(),
        "data": describe_data(data),
        "shapes": shapes,
        "leave_out": lists_used(config),
        "versions": {"python": platform.python_version(), **versions},
        "git_revision": git_revision(),
    }
    storage.write_json(storage.join(config.run_uri, "config.json"), content)
    # A stopped process (SIGSTOP, a frozen machine) cannot run its own `Watchdog`. Ray Train offers a limit only as an
    # environment variable, which its controller inherits from the process that calls `trainer.fit()`.
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(config.hang_timeout)
    return data


def check_files(latents_uri: str) -> None:
    """Raises ValueError for the first file that is missing or has another size than was written.

    It lists the folder once, which takes an object store a second for each thousand files.
    """
    sizes = storage.sizes(storage.join(latents_uri, "data"))
    for file in (file for segment in read_segments(latents_uri) for file in segment["files"]):
        name, size = file["name"], file.get("bytes")
        if name not in sizes or size not in (None, sizes[name]):
            found = f"has {sizes[name]:,} bytes in place of {size:,}" if name in sizes else "is missing"
            raise ValueError(f"{storage.join(latents_uri, 'data', name)} {found}: {MEND}.")


def check_leave_out(config: TrainingConfig, data: DataSets) -> None:
    """Raises ValueError if none of the entries of `leave_out` is the id of a row of the stored latents.

    The rows are not searched in three cases:
        - A data set was encoded with the same list, so it holds none of the listed rows.
        - A data set is encoded while the run trains on it.
        - There are more than `LISTED_ROWS` rows. A sentence then says so.
    """
    manifests, used = data.manifests.values(), exclusions.record(config.leave_out)
    encoded_with_it = any(manifest.job.get("leave_out") == used for manifest in manifests)
    if encoded_with_it or any(manifest.online for manifest in manifests):
        return
    if sum(manifest.written for manifest in manifests) > LISTED_ROWS:
        print(f"leave_out: more than {LISTED_ROWS:,} rows are not searched for its entries before the run.")
    else:
        exclusions.check_found(config.leave_out, list(data.manifests))


def lists_used(config: TrainingConfig) -> list[dict[str, Any]]:
    """The lists that a run had as `leave_out`, one after the other; [] if it had none.

    Each has the "first_step" from which it applies, and the "list" (`exclusions.record`; None if it was taken away).
    """
    used, now = (read_earlier(config) or {}).get("leave_out", []), exclusions.record(config.leave_out)
    if now == (used[-1]["list"] if used else None):
        return used
    return [*used, {"first_step": resume.last_step(config), "list": now}]


def reconcile_checkpoints(run_uri: str) -> list[str]:
    """Delete the checkpoints, and Ray Train's list of them, that the next attempt cannot use.

    Returns sentences about the damaged checkpoints.

    Ray Train fails to start if it cannot read its list of checkpoints, or if the list names a missing folder. Without a
    list it starts a new one. So a list that disagrees with the storage is deleted. Damaged folders, and folders that
    the list does not name, are deleted too. The newest complete folder is kept, because the run resumes from it. Call
    `reconcile_checkpoints` while nothing trains under this name.
    """
    sentences, listed, snapshot_uri = [], [], storage.join(run_uri, SNAPSHOT)
    try:
        listed = [result["checkpoint_dir_name"] for result in storage.read_json(snapshot_uri)["checkpoint_results"]]
    except FileNotFoundError:
        pass
    except (storage.DamagedFile, KeyError):  # the driver was killed while Ray Train wrote it
        storage.delete(snapshot_uri)
        sentences.append(f"{SNAPSHOT} was cut short: Ray Train starts a new list of checkpoints.")
    folders = {storage.name(uri): uri for uri in checkpoint.list_checkpoints(run_uri)}
    problems = {name: "its folder is missing" for name in listed}
    problems |= {name: checkpoint.find_corruption(uri) for name, uri in folders.items()}
    damaged = [name for name in problems if problems[name]]
    sentences += [f"{name} cannot be used: {problems[name]}." for name in damaged]
    if set(damaged) & set(listed):
        storage.delete(snapshot_uri)
    resume_from = next((name for name in folders if name not in damaged), None)
    for name, uri in folders.items():
        if (name in damaged or name not in listed) and name != resume_from:
            storage.delete(uri)
    if sentences:
        sentences.append(f"The run resumes from {resume_from}." if resume_from else "The run starts over.")
    return sentences


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


def check_run(config: TrainingConfig, data: DataSets) -> Plan:
    """A run's plan. Raises ValueError if a parameter does not fit the data, denoiser or earlier run.

    An earlier run of this name must have had the same data, and the same values of the parameters that `config.fixed`
    returns for "rows", "latents" and "run". The other parameters may change.
    """
    check_mixture(data.manifests)
    for uri, manifest in data.manifests.items():
        check_latents(manifest, config, uri)
    check_validation_set(config, data.first)
    plan = plan_run(data, config)
    if earlier := read_earlier(config):
        check_resume(config, earlier["parameters"])
        check_same_data(config, earlier["data"], describe_data(data))
    return plan


def check_resume(config: TrainingConfig, earlier: dict[str, Any]) -> None:
    """Raises ValueError, naming the parameter, if a fixed one differs from `earlier`, the run's parameters so far.

    With a constant learning rate, `max_steps` may grow, as no earlier step depends on it.
    """
    now = config.fixed("rows", "latents", "run")
    if config.lr_schedule == "constant" and config.max_steps > earlier.get("max_steps", config.max_steps):
        earlier = {**earlier, "max_steps": config.max_steps}
    if found := first_difference({**now, **earlier}, now, names=now):
        name, before, value = found
        raise ValueError(
            f"run_name={config.run_name!r} was started with {name}={before!r}, not {value!r}: set it back to "
            "resume the run, or give another run_name."
        )


def check_mixture(manifests: dict[str, Manifest]) -> None:
    """Raises ValueError if data sets of different encoders or layouts are mixed."""
    names = ("num_captions", "encoder", "text_cleaning", "columns", "scaling_factor", "shift_factor", "id_type")
    settings = {
        uri: {name: getattr(manifest, name) for name in (*names, "empty_caption_embedding")}
        for uri, manifest in manifests.items()
    }
    (first_uri, first), *others = settings.items()
    for uri, theirs in others:
        if found := first_difference(theirs, first):
            name, *values = found
            what = "" if name == "empty_caption_embedding" else " ({} and {})".format(*values)
            raise ValueError(
                f"latents_uri mixes {uri} with {first_uri}, which differ in {name}{what}: encode both with the same "
                "settings."
            )


def check_latents(manifest: Manifest, config: TrainingConfig, latents_uri: str) -> None:
    """Raises ValueError unless the denoiser can train on these latents, and its pipeline fits the data's encoders.

    One error names all that does not fit, a sentence each.
    """
    denoiser = load_denoiser_config(config.unet_config)
    adapter = denoisers.ADAPTERS[denoiser["_class_name"]]
    problems = [
        *denoisers.find_faults(config.unet_config),
        *pipeline_problems(adapter, manifest, config, latents_uri),
        *resolution_problems(manifest, config, latents_uri),
        *shape_problems(adapter, denoiser, manifest, config, latents_uri),
    ]
    if config.caption_shares and len(config.caption_shares) != manifest.num_captions:
        problems.append(
            f"caption_shares={list(config.caption_shares)} has {len(config.caption_shares)} numbers, and {latents_uri} "
            f"holds {manifest.num_captions} captions a row: give one for each, or None."
        )
    if problems:
        raise ValueError(" ".join(problems))


def resolution_problems(manifest: Manifest, config: TrainingConfig, uri: str) -> Iterator[str]:
    """A sentence for each resolution that the data lacks."""
    for resolution in config.resolutions:
        if resolution not in manifest.resolutions:
            yield (
                f"resolution={resolution} is not in {uri}, which holds "
                f"{', '.join(map(str, manifest.resolutions))}: choose one of these, or encode the data again with it."
            )
        elif manifest.rows_at(resolution) == 0:
            yield (
                f"resolution={resolution}: none of the pictures of {uri} is as large: choose a smaller one, or encode "
                "the data again with upscale=True."
            )


def shape_problems(
    adapter: denoisers.Adapter, denoiser: dict[str, Any], manifest: Manifest, config: TrainingConfig, uri: str
) -> Iterator[str]:
    """A sentence for each dimension of captions and latents that the denoiser does not take."""
    which, width = f"unet_config={config.unet_config!r}", adapter.caption_width(denoiser)
    if width != manifest.embeddings.shape[-1]:
        yield (
            f"{which} takes captions {width} wide, and {uri} holds captions {manifest.embeddings.shape[-1]} wide "
            f"(encoder_model={manifest.text_encoder_model!r}): choose a denoiser and an encoder that belong together."
        )
    columns = [latents for resolution in config.resolutions for latents in manifest.latents_at(resolution)]
    channels = columns[0].shape[1] if columns else denoiser["in_channels"]
    if denoiser["in_channels"] != channels:
        yield (
            f"{which} takes {denoiser['in_channels']} latent channels, and {uri} holds {channels} (encoder_model="
            f"{manifest.vae_model!r}): choose ones that belong together."
        )
    divisor = adapter.divisor(denoiser)
    for latents in columns:
        height, width = latents.shape[2:]
        if height % divisor or width % divisor:
            yield (
                f"resolution={latents.resolution} makes latents of {width} x {height}, and {which} takes sides that "
                f"are multiples of {divisor}: encode the data for this unet_config, with resolutions that are "
                f"multiples of {latents.size[0] // width * divisor}."
            )


def pipeline_problems(
    adapter: denoisers.Adapter, manifest: Manifest, config: TrainingConfig, uri: str
) -> Iterator[str]:
    """A sentence if the denoiser's pipeline does not take the data's encoders, and one if it lacks `config.sampler`."""
    padded, unfit = not manifest.embeddings.ragged, []
    vae, text_encoder = f"vae_model={manifest.vae_model!r}", f"text_encoder_model={manifest.text_encoder_model!r}"
    if manifest.vae_class not in adapter.vaes:
        unfit.append(f"{vae}, {manifest.vae_class}, not {either(adapter.vaes)}")
    if manifest.shift_factor and not adapter.shifts:
        unfit.append(f"{vae}, whose shift_factor={manifest.shift_factor} it does not apply")
    if manifest.text_encoder_class not in adapter.text_encoders:
        unfit.append(f"{text_encoder}, {manifest.text_encoder_class}, not {either(adapter.text_encoders)}")
    if padded and adapter.masks_padding:
        unfit.append("maximum_tokens=None: it masks padding, and these captions are padded")
    if not padded and not adapter.masks_padding:
        unfit.append("maximum_tokens: it takes padded captions")
    if adapter.text_cleaning not in (None, manifest.text_cleaning):
        cleans = f"where it cleans prompts as {adapter.text_cleaning!r}"
        unfit.append(f"text_cleaning={manifest.text_cleaning!r}, {cleans}")
    which = f"unet_config={config.unet_config!r} draws by {adapter.pipeline}"
    if unfit:
        yield (
            f"{which}, and {uri} was encoded with {'; with '.join(unfit)}: encode the data again, with this "
            "unet_config in Preprocessing.ipynb, or choose another unet_config."
        )
    if config.sampler not in adapter.samplers:
        yield f"{which}, which has no sampler={config.sampler!r}: choose {either(adapter.samplers)}."


def either(names: Sequence[str]) -> str:
    return " or ".join(names)


def check_validation_set(config: TrainingConfig, trained_on: Manifest) -> None:
    """Raises ValueError unless `validation_uri` is empty or holds stored latents that match those of the run."""
    uri, resolution = config.validation_uri, config.largest_resolution
    if not uri:
        return
    if uri in config.proportions:
        raise ValueError(f"validation_uri={uri!r} is what the run trains on: give another data set, or leave it empty.")
    if not storage.exists(storage.join(uri, MANIFEST)) or read_manifest(uri).online:
        raise ValueError(f"validation_uri={uri!r} holds no stored latents: make them with Preprocessing.ipynb.")
    manifest = read_manifest(uri)
    if not manifest.rows_at(resolution):
        raise ValueError(
            f"validation_uri={uri!r} holds no latents of resolution={resolution}, which the run is validated at: "
            "encode the validation set with that resolution."
        )

    def settings(of: Manifest) -> dict[str, Any]:
        shapes = {spec.name: str(spec.shape) for spec in [*of.latents_at(resolution), of.embeddings]}
        names = ("encoder", "text_cleaning", "scaling_factor", "shift_factor")
        return {**{name: getattr(of, name) for name in names}, **shapes}

    if found := first_difference(settings(manifest), settings(trained_on)):
        name, value, ours = found
        raise ValueError(
            f"validation_uri={uri!r} has {name}={value}, and the run's data has {ours}: encode both with the same "
            "settings."
        )


def describe_data(data: DataSets) -> list[dict]:
    """What a run depends on, one dict for each data set: encoder, files in order with their row groups, proportion."""
    return [
        {
            "encoder": manifest.encoder,
            "scaling_factor": manifest.scaling_factor,
            # Left out if 0: runs that began before there was a shift resume.
            **({"shift_factor": manifest.shift_factor} if manifest.shift_factor else {}),
            "written": manifest.written,
            "files_crc32": manifest.files_crc32,
            "proportion": data.proportions[uri],
            "made_with": manifest.made_with,
        }
        for uri, manifest in data.manifests.items()
    ]


def check_same_data(config: TrainingConfig, before: list[dict], now: list[dict]) -> None:
    """Raises ValueError if a run's data has changed since it was started; both as `describe_data` returns them."""
    for uri, *both in zip(config.proportions, before, now, strict=False):
        one, other = ({"encoder": data["encoder"], **data["made_with"]} for data in both)
        if found := first_difference(one, other, one.keys() & other.keys() - {"input_crc32"}):
            name, value_before, value = found
            raise ValueError(
                f"run_name={config.run_name!r} was started on data of {uri} made with {name}={value_before!r}, not "
                f"{value!r}: set it back to resume the run, or give another run_name."
            )
    if first_difference({"data": before}, {"data": now}):
        raise ValueError(
            f"run_name={config.run_name!r} was started on other data than {', '.join(config.proportions)} holds now: "
            "give another run_name."
        )


def git_revision() -> str | None:
    """The commit of the current folder; None outside of a repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
