"""Checks a training run before anything starts, and writes its `config.json`."""

import importlib.metadata
import json
import os
import platform
import subprocess
import zlib

from . import checkpoint, ingest, storage, train
from .runtime import metrics_log
from .unet import load_unet_config


def check_latents(manifest, config, latents_uri):
    """Raises ValueError if the U-Net cannot train on these latents, before a worker starts."""
    unet = load_unet_config(config.unet_config)
    for resolution in config.resolutions:
        if resolution not in manifest.resolutions:
            raise ValueError(
                f"resolution={resolution} is not in {latents_uri}, which holds "
                f"{', '.join(map(str, manifest.resolutions))}: choose one of these, or encode the data again with it."
            )
        if manifest.rows_at(resolution) == 0:
            raise ValueError(
                f"resolution={resolution}: none of the pictures of {latents_uri} is as large: choose a smaller one, or encode "
                "the data again with upscale=True."
            )
    if unet["cross_attention_dim"] != manifest.embeddings.shape[-1]:
        raise ValueError(
            f"unet_config={config.unet_config!r} takes captions {unet['cross_attention_dim']} wide, and "
            f"{latents_uri} holds captions {manifest.embeddings.shape[-1]} wide (encoder_model="
            f"{manifest.encoder['model']!r}): choose a U-Net and an encoder that belong together."
        )
    channels = manifest.latents(config.largest_resolution).shape[1]
    if unet["in_channels"] != channels:
        raise ValueError(
            f"unet_config={config.unet_config!r} takes {unet['in_channels']} latent channels, and {latents_uri} "
            f"holds {channels} (encoder_model={manifest.encoder['model']!r}): choose ones that belong together."
        )
    halvings = len(unet["block_out_channels"]) - 1
    for resolution in config.resolutions:
        size = manifest.latents(resolution).shape[-1]
        if size % 2**halvings:
            raise ValueError(
                f"resolution={resolution} makes latents of {size} x {size}, which unet_config={config.unet_config!r} "
                f"cannot halve {halvings} times: use a multiple of {resolution // size * 2**halvings}."
            )


def check_init_from(config):
    """Raises ValueError if `init_from` names neither a run with a checkpoint nor a U-Net's folder, or another U-Net's."""
    if config.init_from is None:
        return
    if train.first_checkpoint(config):
        run = storage.read_json(storage.join(config.storage, "runs", config.init_from, "config.json"))
        found = load_unet_config(run["parameters"]["unet_config"])
    elif storage.exists(storage.join(config.init_from, "config.json")):
        found = storage.read_json(storage.join(config.init_from, "config.json"))
    else:
        raise ValueError(
            f"init_from={config.init_from!r} is neither a run with a checkpoint under {storage.join(config.storage, 'runs')} "
            "nor a folder with a U-Net in diffusers layout: give one of these, or None."
        )
    for name, value in load_unet_config(config.unet_config).items():
        if name != "sample_size" and not name.startswith("_") and name in found and found[name] != value:
            raise ValueError(
                f"init_from={config.init_from!r} is a U-Net with {name}={found[name]}, and unet_config={config.unet_config!r} "
                f"has {value}: start from one of the same shape."
            )


def open_run(config):
    """Check a run before anything starts, and write its `config.json`; returns the manifest of its latents.

    Raises FileNotFoundError without latents, ValueError for latents that do not fit the U-Net, and for a run of this
    name that was started with other parameters. Damaged checkpoints are set aside, and said.
    """
    manifests = ingest.read_manifests(config)
    ingest.check_mixture(manifests)
    for uri, manifest in manifests.items():
        check_latents(manifest, config, uri)
    ingest.plan_run(manifests, config)
    check_init_from(config)
    uri = storage.join(config.run_uri, "config.json")
    data = [
        describe_data(manifest, share)
        for manifest, share in zip(manifests.values(), config.proportions.values(), strict=True)
    ]
    if storage.exists(uri) and metrics_log.metrics_files(
        config.run_uri
    ):  # not where a first try failed before its first step
        earlier = storage.read_json(uri)
        config.check_resume(earlier["parameters"])
        check_same_data(config, earlier["data"], data)
    for sentence in checkpoint.reconcile_checkpoints(config.run_uri):
        print(sentence)
    # A worker that is stopped cannot end itself: Ray Train asks after it, and waits for an answer as long as this.
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(config.hang_timeout)
    packages = ("ray", "torch", "diffusers", "transformers", "pyarrow", "numpy")
    storage.write_json(
        uri,
        {
            "parameters": config.to_dict(),
            "data": data,
            "versions": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in packages},
            },
            "git_revision": git_revision(),
        },
    )
    return next(iter(manifests.values()))


def describe_data(manifest, proportion):
    """What a run depends on in a data set: its encoder, its files in order and their row groups, its share."""
    return {
        "encoder": manifest.encoder,
        "scaling_factor": manifest.scaling_factor,
        "written": manifest.total("written"),
        "files_crc32": zlib.crc32(json.dumps(manifest.files).encode()),
        "proportion": proportion,
        # Data that was moved is the same data; so is what more workers, or another batch size, made.
        "made_with": {
            name: value for name, value in manifest.job.items() if name not in ("input_uri", "online", "raw_row_bytes")
        },
    }


def check_same_data(config, before, now):
    """Raises ValueError if a run's data is not what it was started on; both as `describe_data` gives them."""
    now = json.loads(json.dumps(now))
    for uri, one, other in zip(config.proportions, before, now, strict=False):
        for name in one["made_with"].keys() & other["made_with"].keys() - {"listing_crc32"}:
            if one["made_with"][name] != other["made_with"][name]:
                raise ValueError(
                    f"run_name={config.run_name!r} was started on data of {uri} made with {name}={one['made_with'][name]!r}, "
                    f"not {other['made_with'][name]!r}: set it back to resume the run, or give another run_name."
                )
    if before != now:
        raise ValueError(
            f"run_name={config.run_name!r} was started on other data than {', '.join(config.proportions)} holds now: give another run_name."
        )


def git_revision():
    """The commit of the folder that this runs in, None outside of a repository."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
