"""Throughput -> hours and dollars, the published tables, how many encoders a trainer needs. No torch, no Ray.

The published numbers are tuples of small frozen records; `pd.DataFrame(ABLATION)` makes a table of one. Each has its
`source` (SOURCES spells it out), `derived` says how a number that is not printed there was computed (empty: as
printed), and `note` says where the documents disagree with each other or with their own arithmetic.
"""

import math
import shlex
from dataclasses import dataclass

import pandas as pd
import yaml

SOURCES = {
    "blog": 'Anyscale, "Reducing the Cost of Pre-training Stable Diffusion by 3.7x with Anyscale"',
    "slides": 'Anyscale, "Efficient Stable Diffusion Pre-Training on Billions of Images with Ray"',
    "quickstart": 'Anyscale, "Quickstart: Stable diffusion pre-training"',
    "MosaicML": 'MosaicML, "Training Stable Diffusion from Scratch for <$50k with MosaicML (Part 2)"',
    "NVIDIA": "NVIDIA's results in MLPerf Training v4.0, Stable Diffusion v2",
}


@dataclass(frozen=True)
class Throughput:
    """One training throughput: all GPUs together, images/s. `speedup` is printed, over the table's first column."""

    setup: str
    resolution: int
    gpus: str
    images_per_second: float
    speedup: float | None
    source: str
    derived: str = ""
    note: str = ""


# Where latents come from, the U-Net and its training being the same. Micro-batch 128 at 256 px, 32 at 512 px.
DATA_PATHS = (
    Throughput("DataLoader", 256, "32 x A100-80G", 2811, None, "slides, Ray Data vs Torch DataLoader"),
    Throughput("offline", 256, "32 x A100-80G", 4068, 1.45, "blog, Table 1"),
    Throughput(
        "online",
        256,
        "32 x A100-80G",
        4075,
        1.45,
        "slides, Ray Data vs Torch DataLoader",
        note="with 40 A10G encoders; printed as +45%",
    ),
    Throughput(
        "DataLoader",
        512,
        "32 x A100-80G",
        817,
        None,
        "blog, Table 1",
        derived="1029 / 1.26, the table's ratio",
        note="the text under the table says 1.57x, which gives 655",
    ),
    Throughput(
        "offline",
        512,
        "32 x A100-80G",
        1029,
        1.26,
        "blog, Table 1",
        note="the text under the table says 1.57x, and the summary 30% for all of it",
    ),
)
# Each row adds to the one before. The blog's Tables 3.a and 3.b lost their first column and two headings on the way
# to text; the slides' 4.a and 4.b are the same tables, whole. Speedups are mostly cut, not rounded, to two digits.
_A, _B = "slides, Table 4.a (blog, Table 3.a)", "slides, Table 4.b (blog, Table 3.b)"
ABLATION = (
    Throughput("DDP", 256, "16 x A100-40G", 1075, None, _A),
    Throughput("+ EFA", 256, "16 x A100-40G", 1269, 1.18, _A),
    Throughput("+ FSDP", 256, "16 x A100-40G", 1925, 1.79, _A),
    Throughput("+ torch.compile", 256, "16 x A100-40G", 2910, 2.71, _A),
    Throughput("DDP", 512, "16 x A100-40G", 264, None, _A),
    Throughput("+ EFA", 512, "16 x A100-40G", 474, 1.86, _A, note="474 / 264 is 1.80, not 1.86"),
    Throughput("+ FSDP", 512, "16 x A100-40G", 667, 2.52, _A),
    Throughput("+ torch.compile", 512, "16 x A100-40G", 805, 3.05, _A),
    Throughput("DDP", 256, "32 x A100-80G", 1573, None, _B),
    Throughput("+ EFA", 256, "32 x A100-80G", 4068, 2.59, _B, note="the offline rate of Table 1"),
    Throughput("+ FSDP", 256, "32 x A100-80G", 5014, 3.18, _B),
    Throughput("+ torch.compile", 256, "32 x A100-80G", 5908, 3.75, _B),
    Throughput("DDP", 512, "32 x A100-80G", 389, None, _B),
    Throughput("+ EFA", 512, "32 x A100-80G", 1029, 2.64, _B, note="the offline rate of Table 1"),
    Throughput("+ FSDP", 512, "32 x A100-80G", 1168, 3.00, _B),
    Throughput("+ torch.compile", 512, "32 x A100-80G", 1349, 3.46, _B),
)


@dataclass(frozen=True)
class Instance:
    """A machine that can be rented."""

    name: str
    gpus: str
    dollars_per_hour: float
    source: str
    derived: str = ""


INSTANCES = (
    Instance("p4de.24xlarge", "8 x A100-80G", 40.96, "blog, Table 2"),
    Instance("g5.2xlarge", "1 x A10G", 1.212, "blog, Table 2"),
    Instance(
        "p4de.24xlarge, 1 year reserved",
        "8 x A100-80G",
        24.01,
        "slides, Results",
        derived="$39,511 / (13,165 A100 hours / 8)",
    ),
    Instance("A100", "1 x A100", 2.00, "MosaicML", derived="an assumption of the authors"),
)


@dataclass(frozen=True)
class Phase:
    """One phase of a full training run. `num_samples` counts a sample each time it is trained on."""

    who: str
    resolution: int
    num_samples: int
    num_steps: int
    global_batch_size: int
    unique_samples: int | None
    gpus: str
    images_per_second: float
    hours: float
    source: str
    derived: str


PHASES = (
    Phase(
        "Anyscale",
        256,
        1_126_400_000,
        275_000,
        4096,
        None,
        "32 x A100-80G",
        5908,
        53.0,
        "slides, Results, Table 4.b",
        derived="steps = samples / batch; hours = samples / rate",
    ),
    Phase(
        "Anyscale",
        512,
        1_740_800_000,
        425_000,
        4096,
        None,
        "32 x A100-80G",
        1349,
        358.5,
        "slides, Results, Table 4.b",
        derived="steps = samples / batch; hours = samples / rate",
    ),
    Phase(
        "MosaicML",
        256,
        1_126_400_000,
        550_000,
        2048,
        790_000_000,
        "128 x A100",
        8148,
        38.4,
        "MosaicML",
        derived="samples: Anyscale's; batch = samples / iterations; rate = samples / 1.6 days",
    ),
    Phase(
        "MosaicML",
        512,
        1_740_800_000,
        850_000,
        2048,
        300_000_000,
        "128 x A100",
        4112,
        117.6,
        "MosaicML",
        derived="samples: Anyscale's; batch = samples / iterations; rate = samples / 4.9 days",
    ),
)


@dataclass(frozen=True)
class PublishedCost:
    """One pass over phase 1 (1,126,400,000 images at 256 px). `one_time_dollars` is part of `dollars`."""

    setup: str
    instances: dict
    images_per_second: float
    hours: float
    dollars: float
    one_time_dollars: float
    source: str
    note: str = ""


_PRICE = "dollars / hours is 40.86 a p4de.24xlarge, not the 40.96 printed below the table"
EPOCH_COSTS = (
    PublishedCost(
        "DataLoader", {"p4de.24xlarge": 4}, 2811, 111.3, 18_192, 0, "slides, Ray Data vs Torch DataLoader", note=_PRICE
    ),
    PublishedCost(
        "offline",
        {"p4de.24xlarge": 4},
        4068,
        76.9,
        14_753,
        2_183,
        "blog, Table 2",
        note=_PRICE + "; the rate's cell is lost: it is Table 1's",
    ),
    PublishedCost(
        "online",
        {"p4de.24xlarge": 4, "g5.2xlarge": 40},
        4075,
        76.8,
        16_275,
        0,
        "blog, Table 2; slides, Ray Data vs Torch DataLoader",
        note=_PRICE,
    ),
)


@dataclass(frozen=True)
class Fact:
    """One published number."""

    value: float
    unit: str
    source: str
    derived: str = ""
    note: str = ""


FACTS = {
    "encoders' share of a step": Fact(
        0.39,
        "of the time",
        "blog, Figure 3",
        note="without it a step would be 1.64x as fast; Table 1 measured 1.45x at 256 px, 1.26x or 1.57x at 512 px",
    ),
    "encoders' time in a step": Fact(0.44, "s", "blog, Figure 3"),
    "memory in use while encoding": Fact(0.25, "of 80 GB", "blog, Figure 3"),
    "encoders busy, offline": Fact(0.95, "of the time, at least", "slides, Benchmark Results"),
    "one A10G, offline": Fact(
        173.7,
        "images/s at 256 px",
        "blog, Table 2",
        derived="1,126,400,000 images for $2,183 at $1.212 an hour",
        note="supposes that the $2,183 are g5.2xlarge hours only; 24 of these would feed 4,068 images/s",
    ),
    "one A10G, online, at least": Fact(
        101.9,
        "images/s at 256 px",
        "slides, Ray Data vs Torch DataLoader",
        derived="4,075 images/s / 40 encoders",
        note="the trainers were the limit, so the encoders may have had room",
    ),
    "one H200, MLPerf at 512 px": Fact(129, "images/s", "NVIDIA", note="a U-Net of the same size"),
    "A100 hours": Fact(
        13_165,
        "A100-80G hours",
        "slides, Results; quickstart",
        note="both phases at the last rates of Table 4.b; preprocessing is not in it",
    ),
    "dollars, reserved for a year": Fact(39_511, "$", "slides, Results; quickstart"),
    "dollars, on demand": Fact(
        67_405,
        "$",
        "slides, Results; quickstart",
        note='13,165 A100 hours at $40.96 / 8: the trainers alone, although the blog says "offline preprocessing"',
    ),
    "MosaicML, training": Fact(20_051, "A100 hours", "MosaicML"),
    "MosaicML, latents": Fact(3_784, "A100 hours", "MosaicML"),
    "MosaicML, all": Fact(
        23_835,
        "A100 hours",
        "MosaicML",
        note='on 128 GPUs these are 7.76 days; the text says "7.45 days" and, for training, 1.6 + 4.9',
    ),
    "MosaicML, dollars": Fact(47_700, "$", "MosaicML", note="23,835 hours at $2, rounded"),
    "MosaicML, EMA from": Fact(800_000, "of 850,000 iterations", "MosaicML"),
    "Stability AI": Fact(
        200_000,
        "A100-40G hours",
        "blog, Table 4",
        note="15 times 13,165 A100-80G hours; the blog says that cost fell about 10x",
    ),
}


def published_ablation(resolution: int) -> pd.DataFrame:
    """The documents' ablation (ABLATION) at 256 or 512 pixels: a row a setting, images/s and speedup on both clusters."""
    columns = {}
    for gpus in ("16 x A100-40G", "32 x A100-80G"):
        found = [row for row in ABLATION if (row.resolution, row.gpus) == (resolution, gpus)]
        if not found:
            raise ValueError(f"resolution={resolution!r} is in no published table: choose 256 or 512.")
        first = found[0].images_per_second
        columns[f"{gpus}, images/s"] = {row.setup: row.images_per_second for row in found}
        columns[f"{gpus}, speedup"] = {row.setup: row.images_per_second / first for row in found}
    return pd.DataFrame(columns).rename_axis("setting")


def data_paths_table(measured: dict, *, resolution: int = 256) -> pd.DataFrame:
    """Where latents come from: `measured` images/s beside the documents' Tables 1 and 2, one row a path.

    `measured`: {"DataLoader": images/s, "offline": ..., "online": ...} of your own machine; a path may be missing.
    `resolution`: of the published rates, 256 or 512. Speed-ups are over the DataLoader; dollars are for one pass over
    the 1,126,400,000 images of phase 1, published for 256 pixels only.
    """
    rates = {row.setup: row.images_per_second for row in DATA_PATHS if row.resolution == resolution}
    dollars = {row.setup: row.dollars for row in EPOCH_COSTS} if resolution == 256 else {}
    rows = {}
    for path in ("DataLoader", "offline", "online"):
        mine, theirs = measured.get(path), rates.get(path)
        rows[path] = {
            "images/s here": mine,
            "speed-up here": mine / measured["DataLoader"] if mine and measured.get("DataLoader") else None,
            f"images/s published, {resolution} px": theirs,
            "speed-up published": theirs / rates["DataLoader"] if theirs else None,
            "dollars published": dollars.get(path),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("latents by")


_BOTH_PHASES = {
    "storage": "s3://your-bucket/sd2",
    "encoder_model": "stabilityai/stable-diffusion-2-base",  # MosaicML; the blog: OpenCLIP-ViT/H and the VAE
    "encoder_precision": "fp16",
    "ray_address": "auto",
    "input_uri": "s3://your-bucket/laion2B-en",
    "input_format": "parquet",
    "row_filter": "aesthetic >= 4.5 and punsafe < 0.1",  # model card of SD 2 base; MosaicML has the first half
    "limit": None,
    "resolutions": [256, 512],
    "latents_uri": "s3://your-bucket/sd2/latents",
    "num_transform_workers": 240,  # not published: six of the eight CPUs of each g5.2xlarge
    "num_encoders": 40,  # slides, Ray Data vs Torch DataLoader
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
# The notebooks' parameters as the full run sets them, by resolution; what is missing stays as the notebook has it.
FULL_RUN = {
    256: _BOTH_PHASES
    | {
        "resolution": 256,
        "micro_batch_size": 128,
        "max_steps": 275_000,
        "ema_start": 275_000,
        "checkpoint_every": 2_500,
        "validate_every": 2_500,
        "run_name": "sd2-256",
    },
    512: _BOTH_PHASES
    | {
        "resolution": 512,
        "micro_batch_size": 32,
        "max_steps": 425_000,
        "ema_start": 400_000,
        "checkpoint_every": 500,
        "validate_every": 500,
        "run_name": "sd2-512",
        "init_from": "sd2-256",
    },
}
# At most 50 characters each: pandas cuts longer ones where a notebook shows them.
_WHY = {
    "storage": "every node must reach it",
    "encoder_model": "VAE and OpenCLIP-ViT/H, frozen",
    "encoder_precision": "half the memory; these weights never train",
    "ray_address": "the cluster that this machine is part of",
    "input_uri": "LAION, English captions",
    "input_format": "pictures and captions in columns",
    "row_filter": "as Stable Diffusion 2 was filtered",
    "limit": "everything",
    "resolutions": "both phases from one pass and one decoding",
    "latents_uri": "encoded once, read by both phases",
    "num_transform_workers": "CPUs beside the encoders (not published)",
    "num_encoders": "40 g5.2xlarge, one A10G each",
    "gpus_per_encoder": "one A10G each",
    "encoder_accelerator_type": "$1.21 an hour, not an eighth of $40.96",
    "encoder_batch_size": "what 24 GB hold at 512 px (not published)",
    "unet_config": "865.9 M parameters",
    "resolution": "phase 1 small, phase 2 large",
    "num_training_workers": "4 p4de.24xlarge, 8 A100-80G each",
    "use_gpu": "a GPU a worker",
    "training_accelerator_type": "keeps trainers off the encoders' GPUs",
    "global_batch_size": "samples = max_steps x this",
    "micro_batch_size": "what fits a GPU; the rest is accumulated",
    "units_per_step": "one unit of 128 rows a worker",
    "max_steps": "1,126,400,000 and 1,740,800,000 samples",
    "learning_rate": "Stable Diffusion's, large models need less",
    "warmup_steps": "Stable Diffusion's",
    "lr_schedule": "Stable Diffusion's",
    "adam_beta2": "a longer memory for a longer run",
    "min_snr_gamma": "Stable Diffusion 2 weighted all steps alike",
    "strategy": "gradients and optimizer sharded (SHARD_GRAD_OP)",
    "compile_unet": "1.15x to 1.51x over FSDP alone",
    "precision": "tensor cores; weights stay fp32",
    "channels_last": "the layout that tensor cores want",
    "activation_checkpointing": "fits without; computes a third more",
    "prediction_type": "Stable Diffusion 2 base predicts the noise",
    "caption_dropout": "for classifier-free guidance",
    "ema_start": "only at the end of phase 2, as MosaicML",
    "ema_decay": "averages about 10,000 steps",
    "checkpoint_every": "about half an hour of work at risk",
    "checkpoints_kept": "the newest may be incomplete",
    "validate_every": "at every checkpoint, as MosaicML",
    "validation_share": "still 79,000 of 790 M rows",
    "max_failures": "nodes will fail; a bug must still end the run",
    "sections": "the main lesson alone",
    "run_name": "the same name resumes",
    "init_from": "phase 2 starts from phase 1's weights",
}


def scale_up_table(parameters: dict, also: tuple = ()) -> pd.DataFrame:
    """The notebook's `parameters` (name -> value) beside the same names in the full SD2 run, one row each.

    `also`: names of parameters that the notebook does not have, for the machines that it needs nothing to know of.

    Columns: "this notebook", "full run, 256 px", "full run, 512 px", "why". Sources are in FULL_RUN's comments and
    in DATA_PATHS, PHASES and FACTS; "not published" marks choices of our own.
    """
    rows = {
        name: [value, FULL_RUN[256].get(name, value), FULL_RUN[512].get(name, value), _WHY.get(name, "")]
        for name, value in {**parameters, **dict.fromkeys(also, "-")}.items()
    }
    columns = ["this notebook", "full run, 256 px", "full run, 512 px", "why"]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns, dtype=object)
    return table.rename_axis("parameter")


def full_run_changes(parameters: dict, resolution: int) -> dict:
    """What to change in the notebook's `parameters` for the full run at `resolution`, 256 or 512 (else ValueError)."""
    if resolution not in FULL_RUN:
        raise ValueError(f"resolution={resolution!r} is no phase of the full run: choose 256 or 512.")
    full = FULL_RUN[resolution]
    return {name: full[name] for name, value in parameters.items() if name in full and full[name] != value}


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
