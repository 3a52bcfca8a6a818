"""What others published about pre-training Stable Diffusion v2: throughput, cost, size of the runs. No torch, no Ray.

The numbers are data, `published_results.yaml`, each with its `source` (its full title is in SOURCES). Tables are
frames. `derived` says how a number that is not printed there was computed. `note` says where documents contradict each
other or their own arithmetic.
"""

import pathlib
from types import SimpleNamespace

import pandas as pd
import yaml

_DATA = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
SOURCES = _DATA["sources"]
DATA_PATHS, ABLATION, SCALING = (pd.DataFrame(_DATA[name]) for name in ("data_paths", "ablation", "scaling"))
INSTANCES, PHASES, EPOCH_COSTS = (pd.DataFrame(_DATA[name]) for name in ("instances", "phases", "epoch_costs"))
TRAINERS, ENCODERS = (pd.DataFrame(_DATA[name]) for name in ("trainers", "encoders"))
# By name; each with `value`, `unit` and `source`.
FACTS = {name: SimpleNamespace(**fact) for name, fact in _DATA["facts"].items()}


def phases_table(measured: dict[int, float]) -> pd.DataFrame:
    """The phases of the published runs, one row each, and how long yours would take for the same samples.

    `measured`: {resolution: your images/s}, all your workers together. They are compared with the published phase of
    that resolution, and other resolutions with phase 1. Column `derived` names the columns that are not published.
    """
    table = PHASES.drop(columns=["unique_samples", "source"])
    table["derived"] = table["derived"].map(", ".join)
    samples = dict(zip(PHASES["resolution"], PHASES["num_samples"], strict=True))
    for resolution, rate in measured.items():
        images = samples.get(resolution, samples[256])
        here = {"who": "here", "resolution": resolution, "num_samples": images, "images_per_second": rate}
        table = pd.concat([table, pd.DataFrame([{**here, "hours": images / rate / 3600}])])
    return table.set_index(["who", "resolution"])


def published_ablation(resolution: int) -> pd.DataFrame:
    """ABLATION at 256 or 512 pixels: one row per setting, images/s and speedup on both clusters."""
    parts = {}
    for gpus, rows in ABLATION[ABLATION["resolution"] == resolution].groupby("gpus"):
        rates = rows.set_index("setup")["images_per_second"]
        parts[gpus] = pd.DataFrame({"images/s": rates, "speedup": rates / rates["DDP"]})
    table = pd.concat(parts, axis=1).rename_axis("setting")
    return table.reindex(["DDP", "+ EFA", "+ FSDP", "+ torch.compile"])


def data_paths_table(measured: dict[str, float]) -> pd.DataFrame:
    """The ways to get latents, one row each: measured images/s beside those of 32 A100s at 256 and 512 pixels.

    `measured`: {"DataLoader": images/s, "offline": ..., "online": ...} of your own machine; any may be missing.
    Speed-ups are over the DataLoader, whose rate at 512 pixels is derived. Published dollars are for one pass over the
    1,126,400,000 images of phase 1.
    """
    costs = EPOCH_COSTS.set_index("setup")
    rates = DATA_PATHS.pivot(index="setup", columns="resolution", values="images_per_second").add_suffix(" px, A100s")
    rates = pd.concat([pd.Series(measured, dtype=float, name="here"), rates], axis=1).reindex(costs.index)
    speedups = rates / rates.loc["DataLoader"]
    dollars = costs[["dollars"]].rename(columns={"dollars": "published"})
    return pd.concat({"images/s": rates, "speed-up": speedups, "dollars": dollars}, axis=1).rename_axis("latents by")
