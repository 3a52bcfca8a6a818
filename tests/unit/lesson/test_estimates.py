"""The published numbers, and what follows from them: totals, rates, encoders, scaling."""

import pathlib
import re

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.lesson import estimates, full_run, planner, published_results

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[3]
FACTS = published_results.FACTS
SD2 = 865_910_724  # parameters


# --- the published numbers --------------------------------------------------------------------------


def test_every_published_number_names_its_document():
    sources = [fact.source for fact in FACTS.values()] + published_results.totals()["source"].tolist()
    for table in ("DATA_PATHS", "ABLATION", "SCALING", "INSTANCES", "PHASES", "EPOCH_COSTS"):
        sources += getattr(published_results, table)["source"].tolist()
    for source in sources:
        assert re.split("[,;]", source)[0] in published_results.SOURCES, source


# Totals that are not what follows from the numbers printed with them, and what does: dollars are cut off, or other
# prices, days and batches were meant.
DO_NOT_FOLLOW = {
    ("DataLoader, an epoch", "dollars"): 18_235,
    ("offline, an epoch", "dollars"): 14_782,
    ("online, an epoch", "dollars"): 16_306,
    ("MosaicML, training", "A100 hours"): 19_968,
    ("MosaicML, days", "days"): 7.76,
    ("MosaicML, dollars", "dollars"): 47_670,
    ("MosaicML, 16 x A100", "dollars"): 31_044,
    ("MosaicML, 32 x A100", "dollars"): 30_806,
    ("MosaicML, 128 x A100", "dollars"): 33_875,
    ("template, steps at 256 px", "steps"): 275_000,
    ("template, steps at 512 px", "steps"): 425_000,
    ("EFA, 512 px, 16 GPUs", "x"): 1.80,
    ("Stability AI over Anyscale", "x"): 15.2,
}


NOT_PRINTED = ["Anyscale, 1 year reserved", "MosaicML's first run over it"]  # what they would follow from


def test_every_published_total_is_recomputed_to_its_digits():
    left = dict(DO_NOT_FOLLOW)
    for row in published_results.totals().drop(NOT_PRINTED).reset_index().itertuples():
        expected = left.pop((row.what, row.unit), row.printed)
        digits = len(f"{expected:g}".partition(".")[2])
        assert round(row.follows, digits) == expected, row
    assert not left and len(published_results.totals()) == 29
    for phase in published_results.PHASES.itertuples():
        assert phase.num_steps * phase.global_batch_size == phase.num_samples
        assert phase.num_samples / phase.images_per_second / 3600 == pytest.approx(phase.hours, abs=0.1)


def test_own_numbers_stand_beside_the_published_ones_and_derived_ones_are_named():
    phases = published_results.phases_table({512: 2 * 1349, 64: 100.0})
    assert phases.loc[("here", 512), "hours"] == pytest.approx(358.5 / 2, abs=0.1)
    assert phases.loc[("here", 64), "num_samples"] == 1_126_400_000  # another size: as many images as phase 1 had
    assert "global_batch_size" in phases.loc[("MosaicML", 256), "derived"]
    assert "global_batch_size" not in phases.loc[("Anyscale", 256), "derived"]
    encoding = published_results.precomputation_table()
    assert encoding["images/s"].tolist() == pytest.approx([173.7, 80.0], abs=0.1)
    paths = published_results.data_paths_table({"DataLoader": 200.0, "online": 300.0})
    assert paths.loc["online", ("speed-up", "here")] == 1.5 and pd.isna(paths.loc["offline", ("images/s", "here")])
    assert paths.loc["offline", [("images/s", "256 px, A100s"), ("dollars", "published")]].tolist() == [4068, 14_753]
    mine = pd.DataFrame({"images/s": [10, 30], "speedup": [1, 3]}, index=["ddp, fp32", "+ fsdp"])
    table = published_results.published_ablation(512, mine)
    assert table.index.tolist() == ["DDP", "+ EFA", "+ FSDP", "+ torch.compile"]
    assert table.loc["+ FSDP", [("32 x A100-80G", "images/s"), ("here", "speedup")]].tolist() == [1168, 3]
    assert table.loc["+ EFA", "here"].tolist() == ["not measured"] * 2 and table.notna().all().all()


# --- what the hardware can do -----------------------------------------------------------------------


def test_flops_of_the_encoders_are_those_of_stable_diffusion_2():
    """Checked by hand: the VAE's 268 GFLOP of convolutions at 256 pixels are four times as many at 512."""
    assert [estimates.encoder_flops(*sizes) / 1e9 for sizes in ((), (256,), (512,), (256, 512))] == pytest.approx(
        [45.127, 317.849, 1161.786, 1434.508], abs=1e-3
    )
    vae, text_encoder = estimates.build_encoders()
    assert sum(p.numel() for p in text_encoder.parameters()) == 340_387_840
    assert sum(p.numel() for p in vae.parameters()) == 83_653_863


def test_flops_of_todays_encoders_are_those_of_t5gemma_and_flux():
    """By hand: 26 layers of 8 heads of 256; two FLOPs a weight and token, four a pair of tokens and number of heads."""
    vae, text_encoder = estimates.build_encoders("today")
    assert sum(p.numel() for p in text_encoder.parameters()) == 2_614_341_888
    assert sum(p.numel() for p in vae.parameters()) == 83_819_683
    linear = sum(module.weight.numel() for module in text_encoder.modules() if isinstance(module, torch.nn.Linear))
    caption = estimates.encoder_flops(recipe="today")
    assert caption == pytest.approx(2 * 128 * linear + 26 * 4 * 128**2 * 8 * 256, rel=1e-3)
    assert estimates.encoder_flops(recipe="today", captions=2) == 2 * caption
    assert (estimates.encoder_flops(256, recipe="today") - caption) / 1e9 == pytest.approx(272.949, abs=1e-3)


def test_hours_of_two_billion_rows_follow_from_the_counted_flops():
    encoders = full_run.PARAMETERS[256]["num_encoders"]
    rate = planner.known_encoder_rate(256).images_per_second
    rate *= estimates.encoder_flops(256) / estimates.encoder_flops(256, 512)  # both sizes in one pass
    hours = estimates.training_hours(2e9, encoders * rate)
    text = (ROOT / "helpers/lesson/Scaling.ipynb").read_text()
    dollars = round(hours * encoders * planner.MACHINES["g5.2xlarge"].dollars_per_hour, -2)
    assert f"{encoders} A10Gs need {hours:.0f} hours" in text and f"That costs ${dollars:,.0f}, more" in text
    assert "-f helpers/profiles/full-sd2-256.yaml" in (ROOT / "helpers/clusters/README.md").read_text()


# --- arithmetic -------------------------------------------------------------------------------------


@given(st.integers(1, 1000), st.floats(1e-3, 1e9))
def test_encoders_needed_are_the_fewest_that_keep_the_trainers_busy(count, trainer_rate):
    encoder_rate = trainer_rate / count
    assert estimates.encoders_needed(trainer_rate, encoder_rate) == count  # rounding never costs one
    assert estimates.online_throughput(count, encoder_rate, trainer_rate) == pytest.approx(trainer_rate)
    if count > 1:
        assert estimates.online_throughput(count - 1, encoder_rate, trainer_rate) < trainer_rate


def scaling(gigabytes, strategy="ddp", seconds=0.5, **options):
    table = estimates.predict_scaling(SD2, seconds, gigabytes, strategy=strategy, **options).set_index("workers")
    return table.set_axis(["seconds", "exposed", "hidden"], axis=1)


def test_scaling_is_what_the_network_leaves():
    table = scaling(50, workers=(1, 8, 16, 128))
    assert table.loc[1].tolist() == [0, 1, 1]
    assert table.loc[8, "seconds"] == pytest.approx(7 / 8 * 8 * SD2 / 300e9)  # by NVLink
    assert table.loc[16, "seconds"] == pytest.approx(15 / 16 * 8 * SD2 / 50e9)
    assert table.loc[128, "exposed"] == pytest.approx(0.5 / (0.5 + 127 / 128 * 8 * SD2 / 50e9))
    assert (table["hidden"] == 1).all()
    assert (scaling(5).loc[16:, "hidden"] < 0.7).all()
    assert scaling(5, "fsdp")["seconds"].tolist() == pytest.approx((0.75 * scaling(5)["seconds"]).tolist())
    sharded, hybrid = scaling(50, "fsdp")["seconds"], scaling(50, "hsdp")["seconds"]
    assert hybrid[8] == sharded[8]
    assert hybrid[32] == pytest.approx(sharded[8] + 3 / 4 * 8 * SD2 / 50e9)


def test_efa_makes_the_difference_that_was_published():
    """DDP on 32 A100s, 128 images a GPU at 256 pixels: with EFA nothing of the communication is exposed."""
    rates = published_results.ABLATION.set_index(["gpus", "resolution", "setup"])["images_per_second"]
    without, with_efa = rates["32 x A100-80G", 256, "DDP"], rates["32 x A100-80G", 256, "+ EFA"]
    for kind, expected in (("EFA", 1), ("TCP", without / with_efa)):
        table = scaling(FACTS[f"network of a node, {kind}"].value, seconds=32 * 128 / with_efa)
        assert table.loc[32, "hidden"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("row", list(published_results.SCALING.itertuples()), ids=lambda row: row.gpus)
def test_the_prediction_agrees_with_mosaicmls_table(row):
    """Their batch of 2,048 leaves 16 images for each of 128 GPUs; an eighth of 50 GB/s a GPU would predict 0.13."""
    one, count = published_results.SCALING["images_per_second_256"][0] / 8, int(row.gpus.split()[0])
    table = scaling(50, seconds=2048 / count / one, workers=(count,))
    assert table.loc[count, "hidden"] == pytest.approx(row.images_per_second_256 / count / one, abs=0.08)
