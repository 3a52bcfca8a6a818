import functools
import json
import math
import pathlib
import re

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.lesson import estimates, full_run, published_results
from helpers.runtime import profiling

PHASE_1 = 1_126_400_000
P4DE = {"p4de.24xlarge": 4}
RECORDS = [
    *published_results.DATA_PATHS,
    *published_results.ABLATION,
    *published_results.SCALING,
    *published_results.SCALING_COSTS,
    *published_results.INSTANCES,
    *published_results.PHASES,
    *published_results.EPOCH_COSTS,
    *published_results.FACTS.values(),
]
POSITIVE = st.floats(1e-3, 1e9)


# --- the published numbers --------------------------------------------------------------------------


def test_every_published_number_names_its_document():
    for record in RECORDS:
        assert record.source.split(",")[0].split(";")[0] in published_results.SOURCES, record


@pytest.mark.parametrize(
    "records",
    [
        published_results.DATA_PATHS,
        published_results.ABLATION,
        published_results.SCALING,
        published_results.INSTANCES,
        published_results.PHASES,
        published_results.EPOCH_COSTS,
    ],
)
def test_published_tables_become_frames(records):
    frame = pd.DataFrame(records)
    assert len(frame) == len(records) and "source" in frame


@pytest.mark.parametrize("published", published_results.EPOCH_COSTS, ids=lambda row: row.setup)
def test_hours_and_dollars_agree_with_table_2(published):
    hours = estimates.training_hours(PHASE_1, published.images_per_second)
    dollars = estimates.dollars(hours, published.instances) + published.one_time_dollars
    assert hours == pytest.approx(published.hours, abs=0.05)
    assert dollars == pytest.approx(published.dollars, rel=0.0025)  # its dollars follow 40.86 $/h, as noted
    exact = (
        estimates.dollars(published.hours, published.instances, {"p4de.24xlarge": 40.86}) + published.one_time_dollars
    )
    assert exact == pytest.approx(published.dollars, rel=0.0002)


def test_savings_agree_with_table_2():
    loader, offline, online = published_results.EPOCH_COSTS
    assert [round(100 * (row.hours / loader.hours - 1), 1) for row in (offline, online)] == [-30.9, -31.0]
    assert [round(100 * (row.dollars / loader.dollars - 1), 1) for row in (offline, online)] == [-18.9, -10.5]


def test_the_full_run_takes_the_published_a100_hours_and_dollars():
    anyscale = [phase for phase in published_results.PHASES if phase.who == "Anyscale"]
    hours = sum(estimates.training_hours(phase.num_samples, phase.images_per_second) for phase in anyscale)
    assert 32 * hours == pytest.approx(published_results.FACTS["A100 hours"].value, abs=1)
    assert estimates.dollars(hours, P4DE) == pytest.approx(published_results.FACTS["dollars, on demand"].value, abs=2)
    reserved = estimates.dollars(hours, {"p4de.24xlarge, 1 year reserved": 4})
    assert reserved == pytest.approx(published_results.FACTS["dollars, reserved for a year"].value, abs=5)


def test_the_mosaicml_run_takes_the_published_hours_and_dollars():
    facts = published_results.FACTS
    hours = facts["MosaicML, training"].value + facts["MosaicML, latents"].value
    assert hours == facts["MosaicML, all"].value
    assert estimates.dollars(hours, {"A100": 1}) == pytest.approx(facts["MosaicML, dollars"].value, abs=50)
    days = sum(phase.hours for phase in published_results.PHASES if phase.who == "MosaicML") / 24
    assert 128 * 24 * days == pytest.approx(facts["MosaicML, training"].value, rel=0.01)


def test_phases_are_consistent():
    for phase in published_results.PHASES:
        assert phase.num_steps * phase.global_batch_size == phase.num_samples
        assert estimates.training_hours(phase.num_samples, phase.images_per_second) == pytest.approx(
            phase.hours, abs=0.1
        )


def test_printed_speedups_follow_from_the_rates_but_for_the_one_noted():
    baseline = {
        (row.gpus, row.resolution): row.images_per_second for row in published_results.ABLATION if row.setup == "DDP"
    }
    for row in published_results.ABLATION:
        if row.speedup and "not 1.86" not in row.note:
            assert row.images_per_second / baseline[row.gpus, row.resolution] == pytest.approx(row.speedup, abs=0.01)


def test_the_ablation_starts_from_the_offline_rate_of_table_1():
    offline = {row.resolution: row.images_per_second for row in published_results.DATA_PATHS if row.setup == "offline"}
    for row in published_results.ABLATION:
        if (row.setup, row.gpus) == ("+ EFA", "32 x A100-80G"):
            assert row.images_per_second == offline[row.resolution]


# What is printed, and what follows from what is printed with it, as far as the printed digits go.
FOLLOW = {
    ("A100 hours", "hours"): (13_165, 13_165),
    ("on demand", "$"): (67_405, 67_405),
    ("DataLoader, an epoch", "hours"): (111.3, 111.3),
    ("offline, an epoch", "hours"): (76.9, 76.9),
    ("online, an epoch", "hours"): (76.8, 76.8),
    ("MosaicML, all", "A100 hours"): (23_835, 23_835),
    ("MosaicML, 8 x A100", "days"): (81.33, 81.33),
    ("MosaicML, 16 x A100", "days"): (40.42, 40.42),
    ("MosaicML, 32 x A100", "days"): (20.06, 20.06),
    ("MosaicML, 64 x A100", "days"): (10.14, 10.14),
    ("MosaicML, 128 x A100", "days"): (5.51, 5.51),
    ("MosaicML, 8 x A100", "$"): (31_230, 31_230),
    ("MosaicML, 64 x A100", "$"): (31_146, 31_146),
}
# These are not what follows: dollars are cut off, or other prices, days and batches were meant.
DO_NOT_FOLLOW = {
    ("DataLoader, an epoch", "$"): (18_192, 18_235),
    ("offline, an epoch", "$"): (14_753, 14_782),
    ("online, an epoch", "$"): (16_275, 16_306),
    ("MosaicML, training", "A100 hours"): (20_051, 19_968),
    ("MosaicML, all", "days"): (7.45, 7.76),
    ("MosaicML, all", "$"): (47_700, 47_670),
    ("MosaicML, 16 x A100", "$"): (31_043, 31_044),
    ("MosaicML, 32 x A100", "$"): (30_805, 30_806),
    ("MosaicML, 128 x A100", "$"): (33_874, 33_875),
    ("template, steps at 256 px", "steps"): (550_000, 275_000),
    ("template, steps at 512 px", "steps"): (850_000, 425_000),
    ("EFA, 512 px, 16 GPUs", "x"): (1.86, 1.80),
    ("Stability AI over Anyscale", "x"): (10, 15.2),
}


def test_every_published_total_is_recomputed_to_its_digits():
    table = published_results.totals().reset_index()
    found = {(row.what, row.unit): (row.printed, row.follows) for row in table.itertuples()}
    expected = {**FOLLOW, **DO_NOT_FOLLOW}
    assert found.keys() == expected.keys() | {("1 year reserved", "$")}
    for name, (printed, follows) in expected.items():
        digits = len(str(follows).partition(".")[2])
        assert (found[name][0], round(found[name][1], digits)) == (printed, follows), name
    assert found["1 year reserved", "$"][0] == 39_511 and math.isnan(found["1 year reserved", "$"][1])
    assert round(47_670, -2) == 47_700  # $47.7k
    assert all(source.split(",")[0].split(";")[0] in published_results.SOURCES for source in table["source"])


def test_own_numbers_stand_beside_the_published_phases():
    table = published_results.phases_table({512: 2 * 1349, 64: 100.0}, dollars_per_hour=10)
    assert table.loc[("Anyscale", 256), "hours"] == 53.0 and len(published_results.phases_table()) == 4
    assert table.loc[("here", 512), "hours"] == pytest.approx(358.5 / 2, abs=0.1)
    assert table.loc[("here", 512), "dollars"] == pytest.approx(1792, abs=1)
    assert table.loc[("here", 64), "images"] == PHASE_1  # another size: as many images as phase 1 had
    two = table.loc["Anyscale", "dollars"].sum()
    assert two == pytest.approx(published_results.FACTS["dollars, on demand"].value, rel=1e-3)


def test_own_encoding_stands_beside_the_published_one():
    table = published_results.precomputation_table(200.0, dollars_per_hour=1.212)
    assert table.loc["Anyscale, 256 px", "images/s"] == pytest.approx(173.7, abs=0.1)
    assert table.loc["MosaicML, 256 and 512 px", ["hours", "dollars"]].tolist() == [3784, 7568]
    assert table.loc["here", "hours"] == pytest.approx(PHASE_1 / 200 / 3600)
    assert table.loc["here", "dollars"] == pytest.approx(1.212 * PHASE_1 / 200 / 3600)
    assert "here" not in published_results.precomputation_table().index


def test_own_workers_stand_below_the_published_scaling():
    table = published_results.scaling_table({2: 500.0}, 512)
    assert table.index.tolist() == [f"{n} x A100" for n in (8, 16, 32, 64, 128)] + ["2 here"]
    assert table.loc["32 x A100", ["images/s", "days, both phases"]].tolist() == [1195, 20.06]
    assert table.loc["2 here", "a GPU"] == 250


def test_the_own_ablation_stands_beside_the_published_one():
    mine = pd.DataFrame({"setting": ["ddp, fp32", "+ bf16", "+ fsdp"], "images/s": [10, 20, 30], "speedup": [1, 2, 3]})
    table = published_results.published_ablation(512, mine.set_index("setting"))
    assert table.index.tolist() == ["DDP", "+ EFA", "+ bf16", "+ FSDP", "+ torch.compile"]
    assert table.loc["+ FSDP", ["32 x A100-80G, images/s", "here, images/s", "here, speedup"]].tolist() == [1168, 30, 3]
    assert pd.isna(table.loc["+ EFA", "here, speedup"]) and pd.isna(table.loc["+ bf16", "32 x A100-80G, speedup"])


# --- what the hardware can do -----------------------------------------------------------------------

ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def flops(what, *resolutions):
    """Of one picture, by "encoders" or by "trainers" (the U-Net, forward and backward)."""
    if what == "encoders":
        return estimates.encoder_flops(*resolutions)
    size = min(resolutions) // 8
    return profiling.training_flops("sd2-base", (4, size, size), (77, 1024))


def peak(gpus):
    """FLOP/s of "32 x A100-80G" or "1 x A10G", in half precision."""
    count, _, name = gpus.partition(" x ")
    return int(count) * 1e12 * profiling.find_accelerator(name).bf16_tflops


def rates_in(text):
    """(sentence, GPUs, images/s, FLOPs of one) of each rate in a sentence that names a GPU; A10Gs are encoders."""
    numbers = r"(?:[\d,.]*\d(?:, | and ))*[\d,.]*\d"
    for sentence in re.split(r"(?<=[.;])\s|\n", text):
        sizes = sorted({int(size) for size in re.findall(r"\b(256|512)\b", sentence)}) or [256]
        sizes = sizes if "one pass" in sentence else sizes[:1]
        for rates in re.findall(rf"({numbers}) (?:images|rows|samples)/s", sentence):
            for count, name in re.findall(r"(?:(\d+) )?\b(A10G|A100|H100|H200)s?\b", sentence):
                count = "1" if " each" in sentence or not count else count
                for rate in re.split(", | and ", rates):
                    work = flops("encoders" if name == "A10G" else "trainers", *sizes)
                    yield sentence, f"{count} x {name}", float(rate.replace(",", "")), work


def test_flops_of_the_encoders_are_those_of_stable_diffusion_2():
    """Checked by hand: the VAE's 268 GFLOP of convolutions at 256 pixels are four times as many at 512."""
    assert [flops("encoders", *sizes) / 1e9 for sizes in ((), (256,), (512,), (256, 512))] == pytest.approx(
        [45.127, 317.849, 1161.786, 1434.508], abs=1e-3
    )
    vae, text_encoder = estimates.sd2_encoders()
    assert sum(p.numel() for p in text_encoder.parameters()) == 340_387_840
    assert sum(p.numel() for p in vae.parameters()) == 83_653_863


def test_no_published_rate_exceeds_what_its_gpus_can_compute():
    published = published_results
    for row in (*published.ABLATION, *published.SCALING, *published.DATA_PATHS, *published.PHASES):
        work = flops("trainers", row.resolution)
        if getattr(row, "setup", "") == "DataLoader":  # encodes on the same GPUs
            work += flops("encoders", row.resolution)
        assert row.images_per_second * work < 0.5 * peak(row.gpus), row
    facts = published.FACTS
    for name in ("one A10G, offline", "one A10G, online, at least"):
        assert facts[name].value * flops("encoders", 256) < peak("1 x A10G")
    assert facts["one H200, MLPerf at 512 px"].value * flops("trainers", 512) < peak("1 x H200")
    phases = [phase for phase in published.PHASES if phase.who == "MosaicML"]
    encoded = sum(phase.unique_samples * flops("encoders", phase.resolution) for phase in phases)
    assert encoded < 3600 * facts["MosaicML, latents"].value * peak("1 x A100")


@pytest.mark.parametrize("resolution", full_run.PARAMETERS)
def test_the_full_runs_encoders_feed_its_trainers_online(resolution):
    """At a rate that an A10G can reach; the published 40 would not, at either size."""
    full = full_run.PARAMETERS[resolution]
    rate = estimates.encoder_rate([resolution])
    trainers = next(phase for phase in published_results.PHASES if phase.resolution == resolution)
    assert rate * flops("encoders", resolution) < 0.5 * peak("1 x A10G")
    assert full["num_encoders"] == pytest.approx(estimates.encoders_needed(trainers.images_per_second, rate), rel=0.08)
    assert estimates.online_throughput(full["num_encoders"], rate, trainers.images_per_second) == (
        trainers.images_per_second
    )
    assert estimates.online_throughput(40, rate, trainers.images_per_second) < trainers.images_per_second
    assert full["num_transform_workers"] == 6 * full["num_encoders"]


def test_both_sizes_in_one_pass_take_an_a10g_a_twentieth_of_a_second():
    assert 20 < estimates.encoder_rate([256, 512]) < 23 < 100 < estimates.encoder_rate([256])
    assert estimates.encoder_rate([256, 512], "H200", 0.5) == pytest.approx(0.5 * 989e12 / flops("encoders", 256, 512))


def test_no_rate_in_the_texts_exceeds_what_its_gpus_can_compute():
    texts = [(ROOT / name).read_text() for name in ("README.md", "tests/benchmarks/README.md")]
    for path in ROOT.glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        texts += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    found = [claim for text in texts for claim in rates_in(text)]
    assert len(found) >= 6
    for sentence, gpus, rate, work in found:
        assert rate * work < peak(gpus), sentence
    wrong = "40 A10Gs encode 256 and 512 pixels in one pass at 102 images/s each."
    assert [rate * work > peak(gpus) for _, gpus, rate, work in rates_in(wrong)] == [True]


def test_hours_of_two_billion_rows_follow_from_the_counted_flops():
    encoders = full_run.PARAMETERS[256]["num_encoders"]
    hours = estimates.training_hours(2e9, encoders * estimates.encoder_rate([256, 512]))
    for name in ("README.md", "tests/benchmarks/README.md"):
        text = (ROOT / name).read_text()
        assert f"{hours:.0f} hours" in text and f"{encoders} " in text
    assert "-f helpers/profiles/full-sd2-256.yaml" in (ROOT / "README.md").read_text()


# --- arithmetic -------------------------------------------------------------------------------------


@given(POSITIVE, POSITIVE)
def test_encoders_needed_are_the_fewest_that_keep_the_trainers_busy(trainer_rate, encoder_rate):
    count = estimates.encoders_needed(trainer_rate, encoder_rate)
    assert estimates.online_throughput(count, encoder_rate, trainer_rate) == pytest.approx(trainer_rate)
    if count > 1:
        assert estimates.online_throughput(count - 1, encoder_rate, trainer_rate) < trainer_rate


@given(st.integers(1, 1000), POSITIVE)
def test_rounding_never_costs_an_encoder(count, trainer_rate):
    assert estimates.encoders_needed(trainer_rate, trainer_rate / count) == count


def test_online_throughput_rises_linearly_until_the_trainers_saturate():
    assert [estimates.online_throughput(n, 100, 350) for n in (1, 2, 3, 4, 8)] == [100, 200, 300, 350, 350]


@given(POSITIVE, POSITIVE)
def test_dollars_are_hours_times_price(num_samples, rate):
    hours = estimates.training_hours(num_samples, rate)
    assert hours == pytest.approx(num_samples / 3600 / rate)
    assert estimates.dollars(hours, {"mine": 2}, prices={"mine": 1.5}) == pytest.approx(3 * hours)


def test_own_prices_override_and_add():
    assert estimates.dollars(2, {"g5.2xlarge": 1, "mine": 1}, {"g5.2xlarge": 1.0, "mine": 3}) == 8


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: estimates.training_hours(0, 10), "num_samples=0"),
        (lambda: estimates.training_hours(10, -1), "images_per_second=-1"),
        (lambda: estimates.training_hours(10, math.nan), "images_per_second=nan"),
        (lambda: estimates.training_hours(10, math.inf), "images_per_second=inf"),
        (lambda: estimates.training_hours("many", 1), "num_samples='many'"),
        (lambda: estimates.training_hours(True, 1), "num_samples=True"),
        (lambda: estimates.encoders_needed(0, 1), "trainer_rate=0"),
        (lambda: estimates.encoders_needed(1, None), "encoder_rate=None"),
        (lambda: estimates.online_throughput(0, 1, 1), "num_encoders=0"),
        (lambda: estimates.online_throughput(1.5, 1, 1), "num_encoders=1.5"),
        (lambda: estimates.dollars(0, P4DE), "hours=0"),
        (lambda: estimates.dollars(1, {}), "names no machine"),
        (lambda: estimates.dollars(1, {"p5": 1}), "'p5'"),
        (lambda: estimates.dollars(1, {"p4de.24xlarge": 0}), "instances['p4de.24xlarge']=0"),
        (lambda: estimates.dollars(1, {"mine": 1}, {"mine": 0}), "prices['mine']=0"),
        (lambda: estimates.encoder_rate([256], "RTX A1000"), "accelerator='RTX A1000'"),
        (lambda: estimates.encoder_rate([256], utilization=0), "utilization=0"),
        (lambda: full_run.command("a", {}, 768, "b"), "resolution=768"),
    ],
)
def test_bad_values_are_named_in_one_sentence(call, named):
    with pytest.raises(ValueError) as error:
        call()
    assert named in str(error.value) and "\n" not in str(error.value)


def test_the_table_of_data_paths_puts_measured_rates_beside_the_published_ones():
    table = published_results.data_paths_table({"DataLoader": 200.0, "online": 300.0})
    assert table.index.tolist() == ["DataLoader", "offline", "online"]
    assert table.loc["online", "speed-up here"] == 1.5 and pd.isna(table.loc["offline", "images/s here"])
    assert (
        table.loc["offline", "images/s published, 256 px"] == 4068
        and table.loc["offline", "dollars published"] == 14_753
    )
    assert table.loc["online", "speed-up published"] == pytest.approx(1.45, abs=0.005)
    assert pd.isna(published_results.data_paths_table({}, resolution=512).loc["offline", "dollars published"])


# ---- the published ablation, and scaling by arithmetic


@pytest.mark.parametrize(("resolution", "last"), [(256, [2910, 5908]), (512, [805, 1349])])
def test_the_published_ablation_is_a_table_of_both_clusters(resolution, last):
    table = published_results.published_ablation(resolution)
    assert list(table.index) == ["DDP", "+ EFA", "+ FSDP", "+ torch.compile"]
    assert table.iloc[-1][["16 x A100-40G, images/s", "32 x A100-80G, images/s"]].tolist() == last
    assert (table.iloc[0][["16 x A100-40G, speedup", "32 x A100-80G, speedup"]] == 1).all()


def test_a_resolution_without_a_published_ablation_is_one_sentence():
    with pytest.raises(ValueError, match="^resolution=64 is in no published table: choose 256 or 512.$"):
        published_results.published_ablation(64)


SD2 = 865_910_724


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
    assert scaling(5, "fsdp-full").equals(scaling(5)) and len(scaling(5)) == 5


def test_a_ring_crosses_a_nodes_network_once_for_all_its_ranks():
    """So the ranks of a node do not share its bandwidth; only a network faster than NVLink is not the slowest link."""
    for ranks_per_node in (1, 4, 8):
        assert scaling(50, ranks_per_node=ranks_per_node, workers=(16,)).equals(scaling(50, workers=(16,)))
    assert scaling(50, ranks_per_node=4).loc[8, "seconds"] == pytest.approx(7 / 8 * 8 * SD2 / 50e9)
    assert scaling(1000).loc[16, "seconds"] == pytest.approx(15 / 16 * 8 * SD2 / 300e9)


def test_hsdp_sends_shards_across_nodes_and_the_rest_within():
    table, sharded = scaling(50, "hsdp"), scaling(50, "fsdp")
    assert table.loc[8].equals(sharded.loc[8])
    across = 3 / 4 * 8 * SD2 / 50e9
    assert table.loc[32, "seconds"] == pytest.approx(sharded.loc[8, "seconds"] + across)


@pytest.mark.parametrize(("resolution", "with_efa", "without"), [(256, 4068, 1573), (512, 1029, 389)])
def test_efa_makes_the_difference_that_was_published(resolution, with_efa, without):
    """DDP on 32 A100s: 128 or 32 images a GPU; with EFA nothing of the communication is exposed."""
    rates = [row.images_per_second for row in published_results.ABLATION if row.gpus == "32 x A100-80G"]
    assert with_efa in rates and without in rates
    seconds = 32 * {256: 128, 512: 32}[resolution] / with_efa
    for kind, expected in (("EFA", 1), ("TCP", without / with_efa)):
        network = published_results.FACTS[f"network of a node, {kind}"].value
        assert scaling(network, seconds=seconds).loc[32, "hidden"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("row", published_results.SCALING, ids=lambda row: f"{row.gpus} {row.resolution}")
def test_the_prediction_agrees_with_mosaicmls_table(row):
    """Their batch of 2,048 leaves 16 images for each of 128 GPUs; an eighth of 50 GB/s a GPU would predict 0.13."""
    rows = {other.gpus: other for other in published_results.SCALING if other.resolution == row.resolution}
    one = rows["8 x A100"].images_per_second / 8
    count = int(row.gpus.split()[0])
    table = scaling(50, seconds=2048 / count / one, workers=(count,))
    assert table.loc[count, "hidden"] == pytest.approx(row.images_per_second / count / one, abs=0.08)


@pytest.mark.parametrize(
    "change", [{"strategy": "tp"}, {"step_seconds": 0}, {"gigabytes_per_second": -1}, {"workers": [1.5]}]
)
def test_scaling_of_what_cannot_be_is_one_sentence(change):
    values = {"parameters": 1e6, "step_seconds": 1.0, "gigabytes_per_second": 1.0, **change}
    with pytest.raises(ValueError, match=r"^(strategy|step_seconds|gigabytes_per_second|workers)=.*\.$"):
        estimates.predict_scaling(**values)
