"""The full Stable Diffusion v2 run: how it differs from a notebook's parameters, and the command that starts it.

Its parameters, with their sources, are files that papermill reads (`papermill -f`): `helpers/profiles/`. A profile
serves all three notebooks.
"""

import os
import pathlib
import shlex
from typing import Any

import pandas as pd
import yaml

PROFILES = pathlib.Path(__file__).parents[1] / "profiles"


def read_profile(name: str) -> dict[str, Any]:
    """The parameters of a profile, such as "laptop" or "full-sd2-256". ValueError for an unknown one."""
    path = PROFILES / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(repr(found.stem) for found in PROFILES.glob("*.yaml")))
        raise ValueError(f"profile={name!r} is unknown: choose one of {known}.")
    return yaml.safe_load(path.read_text())


# By resolution: phase 1 at 256 pixels, then phase 2. A parameter that is missing here keeps the notebook's value.
PARAMETERS = {resolution: read_profile(f"full-sd2-{resolution}") for resolution in (256, 512)}
# Why the full run differs, by group; at most 50 characters each, since pandas cuts longer ones in a notebook.
_WHY = {
    "data": {
        "storage": "every node must reach it",
        "input_uri": "LAION, English captions",
        "input_format": "images and captions in columns",
        "row_filter": "as Stable Diffusion 2 was filtered",
        "limit": "all rows",
        "resolutions": "both phases in one pass",
        "size_multiple": "what the U-Net can halve three times",
        "resolution": "phase 1 small, phase 2 large",
        "init_from": "phase 2 starts from phase 1's weights",
    },
    "encoder": {
        "encoder_model": "VAE and OpenCLIP-ViT/H, frozen",
        "encoder_revision": "a commit: these weights and no others",
        "encoder_precision": "half the memory; encoders do not train",
        "encoder_batch_size": "what 24 GB hold at 512 px",
    },
    "machines": {
        "ray_address": "the cluster that this machine is part of",
        "num_transform_workers": "six of the eight CPUs beside an encoder",
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
        "compile_unet": "1.15x to 1.51x over FSDP alone, derived",
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
        "timestep_sampling": "without weights all timesteps count the same",
        "caption_dropout": "for classifier-free guidance",
        "ema_start": "near the end of phase 2, as MosaicML",
        "ema_decay": "averages about 10,000 steps",
    },
    "checkpoints and validation": {
        "checkpoint_every": "about half an hour of work at risk",
        "checkpoints_kept": "the newest may be incomplete",
        "validate_every": "every half hour, then every two hours",
        "validation_share": "still 79,000 of 790 M rows",
        "clip_model": "for photographs; tiny-clip knows drawn images",
    },
    "run": {
        "run_name": "the same name resumes",
        "sections": "only what a job needs",
    },
}


def compare_parameters(parameters: dict) -> pd.DataFrame:
    """What the full run changes in a notebook's `parameters` (name -> value), one row each, grouped by subject.

    Columns: "this notebook", "full run, 256 px", "full run, 512 px", "why".
    """
    rows = {}
    for group, whys in _WHY.items():
        for name, why in whys.items():
            here = parameters.get(name)
            full = [of_phase.get(name, here) for of_phase in PARAMETERS.values()]
            if name in parameters and full != [here, here]:
                rows[group, name] = [here, *full, why]
    columns = ["this notebook", "full run, 256 px", "full run, 512 px", "why"]
    index = pd.MultiIndex.from_tuples(rows, names=["group", "parameter"]) if rows else None
    return pd.DataFrame(list(rows.values()), columns=columns, index=index, dtype=object)


def command(notebook: str, parameters: dict, resolution: int, output: str) -> str:
    """The shell command that runs `notebook` as the full run, on the cluster that this machine is part of.

    It names the locations among the notebook's `parameters`: change these. `resolution`: 256 or 512, else ValueError.
    """
    if resolution not in PARAMETERS:
        raise ValueError(f"resolution={resolution!r} is not a phase of the full run: choose 256 or 512.")
    profile = os.path.relpath(PROFILES / f"full-sd2-{resolution}.yaml")
    parts = [["papermill", notebook, output, "--inject-output-path"], ["-f", profile]]
    full = PARAMETERS[resolution]
    parts += [["-p", name, full[name]] for name in ("input_uri", "storage") if name in parameters]
    return " \\\n    ".join(shlex.join(part) for part in parts)
