"""What others published about pre-training Stable Diffusion v2: throughput, cost, size of the runs. No torch, no Ray.

Tables are tuples of frozen records; `pd.DataFrame(ABLATION)` makes a frame of one. Each record has its `source` (its
full title is in SOURCES). `derived` says how a number that is not printed there was computed (empty: as printed), and
`note` where the documents contradict each other or their own arithmetic.
"""

import math
from dataclasses import dataclass

import pandas as pd

SOURCES = {
    "blog": 'Anyscale, "Reducing the Cost of Pre-training Stable Diffusion by 3.7x with Anyscale"',
    "slides": 'Anyscale, "Efficient Stable Diffusion Pre-Training on Billions of Images with Ray"',
    "quickstart": 'Anyscale, "Quickstart: Stable diffusion pre-training"',
    "template": "Anyscale, template stable-diffusion-pretraining of the repository anyscale/templates",
    "MosaicML": 'MosaicML, "Training Stable Diffusion from Scratch for <$50k with MosaicML (Part 2)"',
    "mosaicml/diffusion": "MosaicML, README of the repository mosaicml/diffusion",
    "NVIDIA": "NVIDIA's results in MLPerf Training v4.0, Stable Diffusion v2",
    "NVIDIA A100": "NVIDIA, A100 Tensor Core GPU, data sheet",
    "AWS": "Amazon EC2, P4 instances",
}


@dataclass(frozen=True)
class Throughput:
    """One training throughput, images/s of all GPUs together. `speedup` is as printed, over the table's first row."""

    setup: str
    resolution: int
    gpus: str
    images_per_second: float
    speedup: float | None
    source: str
    derived: str = ""
    note: str = ""


# By source of the latents, with the same U-Net and training. Micro-batch 128 at 256 px, 32 at 512 px.
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
        note="the text below the table says 1.57x, which gives 655",
    ),
    Throughput(
        "offline",
        512,
        "32 x A100-80G",
        1029,
        1.26,
        "blog, Table 1",
        note="the text below the table says 1.57x, and the summary 30%",
    ),
)
# Each row adds one optimisation to the row before. The slides' Tables 4.a and 4.b are the blog's 3.a and 3.b, which are
# incomplete there. Most speedups are truncated, not rounded, to two digits.
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
# The U-Net alone on stored latents, on 8 to 128 GPUs.
_C = "mosaicml/diffusion, How many GPUs do I need?"
SCALING = tuple(
    Throughput("latents stored", resolution, f"{gpus} x A100", rate, None, _C)
    for resolution, rates in ((256, (1100, 2180, 4080, 8530, 11_600)), (512, (290, 585, 1195, 2340, 4590)))
    for gpus, rate in zip((8, 16, 32, 64, 128), rates, strict=True)
)


@dataclass(frozen=True)
class FullRun:
    """Both phases on a number of GPUs, at SCALING's rates and $2 a GPU-hour; without the encoders."""

    gpus: str
    days: float
    dollars: int
    source: str


SCALING_COSTS = tuple(
    FullRun(f"{gpus} x A100", days, dollars, _C)
    for gpus, days, dollars in (
        (8, 81.33, 31_230),
        (16, 40.42, 31_043),
        (32, 20.06, 30_805),
        (64, 10.14, 31_146),
        (128, 5.51, 33_874),
    )
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
        note=_PRICE + "; the rate is Table 1's, its cell is missing here",
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
        note="assumes that the $2,183 are g5.2xlarge hours only; 24 of them would then feed 4,068 images/s, each at "
        "79 % of its GPU's peak",
    ),
    "one A10G, online, at least": Fact(
        101.9,
        "images/s at 256 px",
        "slides, Ray Data vs Torch DataLoader",
        derived="4,075 images/s / 40 encoders",
        note="the trainers were the bottleneck, so the encoders may be faster; 46 % of the GPU's peak",
    ),
    "one H200, MLPerf at 512 px": Fact(129, "images/s", "NVIDIA", note="a U-Net of the same size"),
    "A100 hours": Fact(
        13_165,
        "A100-80G hours",
        "slides, Results; quickstart",
        note="both phases at the last rates of Table 4.b, without preprocessing",
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
    "network of a node, EFA": Fact(50, "GB/s", "AWS", derived="p4d and p4de: 400 Gbit/s"),
    "network of a node, TCP": Fact(
        2.9,
        "GB/s",
        "slides, Table 4.b",
        derived="the bus bandwidth that explains DDP's 1,573 images/s without and 4,068 with EFA (389 and 1,029 at 512 "
        "pixels), if two thirds of a step hide communication",
    ),
    "NVLink of an A100": Fact(300, "GB/s", "NVIDIA A100", derived="600 GB/s are both directions together"),
    "template, CPUs that load": Fact(192, "CPUs", "template, 01_preprocess.ipynb"),
    "template, CPUs that transform": Fact(192, "CPUs", "template, 01_preprocess.ipynb"),
    "template, encoders": Fact(48, "A10Gs", "template, 01_preprocess.ipynb"),
    "template, encoder batch at 256 px": Fact(120, "images", "template, 01_preprocess.ipynb"),
    "template, encoder batch at 512 px": Fact(40, "images", "template, 01_preprocess.ipynb"),
    "template, steps at 256 px": Fact(
        550_000, "steps", "template, 02_train.ipynb", note="MosaicML's, of 2,048; a batch of 4,096 makes them 275,000"
    ),
    "template, steps at 512 px": Fact(
        850_000, "steps", "template, 02_train.ipynb", note="MosaicML's, of 2,048; a batch of 4,096 makes them 425,000"
    ),
    "Stability AI": Fact(
        200_000,
        "A100-40G hours",
        "blog, Table 4",
        note="15 times 13,165 A100-80G hours; the blog says that cost fell about 10x",
    ),
}


def totals() -> pd.DataFrame:
    """Every published total beside what follows from the numbers printed with it, one row each.

    Columns: printed, follows, unit, how, source. A total that does not follow differs by more than rounding.
    """
    anyscale, mosaicml = ([phase for phase in PHASES if phase.who == who] for who in ("Anyscale", "MosaicML"))
    p4de, g5, _, a100 = (instance.dollars_per_hour for instance in INSTANCES)
    fact = {name: found.value for name, found in FACTS.items()}
    a100_hours = 32 * sum(phase.num_samples / phase.images_per_second for phase in anyscale) / 3600
    rows = [
        ("A100 hours", fact["A100 hours"], a100_hours, "hours", "samples / rate of Table 4.b, on 32 GPUs", "slides"),
        (
            "on demand",
            fact["dollars, on demand"],
            fact["A100 hours"] * p4de / 8,
            "$",
            "13,165 hours, $40.96 / 8",
            "slides",
        ),
        ("1 year reserved", fact["dollars, reserved for a year"], math.nan, "$", "the price is not printed", "slides"),
    ]
    for cost in EPOCH_COSTS:
        hours = anyscale[0].num_samples / cost.images_per_second / 3600
        per_hour = sum({"p4de.24xlarge": p4de, "g5.2xlarge": g5}[name] * n for name, n in cost.instances.items())
        dollars = cost.hours * per_hour + cost.one_time_dollars
        once = ", and $2,183 once" if cost.one_time_dollars else ""
        rows += [
            (f"{cost.setup}, an epoch", cost.hours, hours, "hours", "1,126,400,000 / rate", cost.source),
            (f"{cost.setup}, an epoch", cost.dollars, dollars, "$", f"hours x ${per_hour:.2f}{once}", cost.source),
        ]
    latents, training = fact["MosaicML, latents"], fact["MosaicML, training"]
    days = sum(phase.hours for phase in mosaicml) / 24
    rows += [
        ("MosaicML, training", training, 128 * 24 * days, "A100 hours", "128 GPUs, 1.6 + 4.9 days", "MosaicML"),
        ("MosaicML, all", fact["MosaicML, all"], training + latents, "A100 hours", "20,051 + 3,784", "MosaicML"),
        ("MosaicML, all", 7.45, fact["MosaicML, all"] / 128 / 24, "days", "23,835 hours, 128 GPUs", "MosaicML"),
        ("MosaicML, all", fact["MosaicML, dollars"], fact["MosaicML, all"] * a100, "$", "23,835 hours, $2", "MosaicML"),
    ]
    for run in SCALING_COSTS:
        rates = {row.resolution: row.images_per_second for row in SCALING if row.gpus == run.gpus}
        hours = sum(phase.num_samples / rates[phase.resolution] for phase in anyscale) / 3600
        gpus, how = int(run.gpus.split()[0]), "samples / rates"
        rows += [
            (f"MosaicML, {run.gpus}", run.days, hours / 24, "days", how, run.source),
            (f"MosaicML, {run.gpus}", run.dollars, gpus * hours * a100, "$", f"{how}, $2 a GPU-hour", run.source),
        ]
    for phase in anyscale:
        steps, how = phase.num_samples / phase.global_batch_size, "samples / batch of 4,096"
        name = f"template, steps at {phase.resolution} px"
        rows.append((name, fact[name], steps, "steps", how, FACTS[name].source))
    efa = {row.setup: row for row in ABLATION if (row.gpus, row.resolution) == ("16 x A100-40G", 512)}
    ratio = efa["+ EFA"].images_per_second / efa["DDP"].images_per_second
    rows += [
        ("EFA, 512 px, 16 GPUs", efa["+ EFA"].speedup, ratio, "x", "474 / 264 images/s", "slides, Table 4.a"),
        ("Stability AI over Anyscale", 10, fact["Stability AI"] / fact["A100 hours"], "x", "200,000 / 13,165", "blog"),
    ]
    names = ["what", "printed", "follows", "unit", "how", "source"]
    return pd.DataFrame(rows, columns=names).set_index("what")


def phases_table(measured: dict[int, float] | None = None, dollars_per_hour: float | None = None) -> pd.DataFrame:
    """Both phases of the published runs, one row each, and how long yours would take for the same samples.

    `measured`: {resolution: your images/s}, of all your workers together, compared with the published phase of that
    resolution; `dollars_per_hour`: of all your machines. Published dollars: $40.96 per p4de.24xlarge hour on demand, $2
    per A100 hour at MosaicML.
    """
    prices = {"Anyscale": 4 * INSTANCES[0].dollars_per_hour, "MosaicML": 128 * INSTANCES[3].dollars_per_hour}
    columns = ["who", "pixels", "images", "steps", "batch", "GPUs", "images/s", "hours", "dollars"]
    rows = [
        (p.who, p.resolution, p.num_samples, p.num_steps, p.global_batch_size, p.gpus, p.images_per_second, p.hours)
        + (prices[p.who] * p.hours,)
        for p in PHASES
    ]
    for pixels, rate in (measured or {}).items():
        images = next((p.num_samples for p in PHASES if p.resolution == pixels), PHASES[0].num_samples)
        hours = images / rate / 3600
        cost = dollars_per_hour * hours if dollars_per_hour else None
        rows.append(("here", pixels, images, None, None, None, rate, hours, cost))
    return pd.DataFrame(rows, columns=columns).set_index(["who", "pixels"])


def precomputation_table(rows_per_second: float | None = None, dollars_per_hour: float | None = None) -> pd.DataFrame:
    """What encoding a data set once cost others, one row each, and what it would cost at your rows/s.

    `rows_per_second`: of all your encoders together; yours is computed for the images of the published phase 1.
    """
    phase, mosaicml = PHASES[0], [p for p in PHASES if p.who == "MosaicML"]
    g5 = INSTANCES[1].dollars_per_hour
    hours, encoded = FACTS["MosaicML, latents"].value, sum(p.unique_samples for p in mosaicml)
    rows = {
        "Anyscale, 256 px": (phase.num_samples, "A10G", EPOCH_COSTS[1].one_time_dollars / g5, 2183.0, "blog, Table 2"),
        "MosaicML, 256 and 512 px": (encoded, "A100", hours, INSTANCES[3].dollars_per_hour * hours, "MosaicML"),
    }
    if rows_per_second:
        hours = phase.num_samples / rows_per_second / 3600
        rows["here"] = (phase.num_samples, "all encoders", hours, dollars_per_hour and dollars_per_hour * hours, "")
    columns = ["images", "of what", "hours", "dollars", "source"]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    table.insert(4, "images/s", table["images"] / table["hours"] / 3600)
    return table


def scaling_table(measured: dict[int, float] | None = None, resolution: int = 256) -> pd.DataFrame:
    """MosaicML's U-Net on 8 to 128 A100s, one row each, with your images/s by number of workers below.

    Columns: images/s, in total and per GPU; days and dollars for both phases (published only).
    """
    rows = {
        row.gpus: {"images/s": row.images_per_second, "a GPU": row.images_per_second / int(row.gpus.split()[0])}
        for row in SCALING
        if row.resolution == resolution
    }
    for run in SCALING_COSTS:
        if run.gpus in rows:
            rows[run.gpus] |= {"days, both phases": run.days, "dollars, both phases": run.dollars}
    rows |= {
        f"{workers} here": {"images/s": rate, "a GPU": rate / workers} for workers, rate in (measured or {}).items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(f"{resolution} px")


# The settings of `ablations.ABLATION` that are published.
_SAME_SETTING = {"ddp, fp32": "DDP", "+ fsdp": "+ FSDP"}


def published_ablation(resolution: int, measured: pd.DataFrame | None = None) -> pd.DataFrame:
    """ABLATION at 256 or 512 pixels: one row per setting, images/s and speedup on both clusters. ValueError otherwise.

    `measured`: your own results by setting (`ablations.ablation`); adds their "images/s" and "speedup".
    """
    columns = {}
    for gpus in ("16 x A100-40G", "32 x A100-80G"):
        rows = [row for row in ABLATION if (row.resolution, row.gpus) == (resolution, gpus)]
        if not rows:
            raise ValueError(f"resolution={resolution!r} is in no published table: choose 256 or 512.")
        first = rows[0].images_per_second
        columns[f"{gpus}, images/s"] = {row.setup: row.images_per_second for row in rows}
        columns[f"{gpus}, speedup"] = {row.setup: row.images_per_second / first for row in rows}
    table = pd.DataFrame(columns).rename_axis("setting")
    if measured is None:
        return table
    mine = measured[["images/s", "speedup"]].rename(index=_SAME_SETTING).add_prefix("here, ")
    order = ["DDP", "+ EFA", "+ bf16", "+ FSDP", "+ torch.compile", "+ channels last"]
    return table.join(mine, how="outer").reindex([name for name in order if name in {*table.index, *mine.index}])


def data_paths_table(measured: dict, *, resolution: int = 256) -> pd.DataFrame:
    """The three ways to get latents, one row each: `measured` images/s beside the published (blog, Tables 1 and 2).

    `measured`: {"DataLoader": images/s, "offline": ..., "online": ...} of your own machine; any may be missing.
    `resolution`: of the published rates, 256 or 512. Speed-ups are over the DataLoader. Dollars are for one pass over
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
