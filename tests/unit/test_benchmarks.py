"""The benchmarks that need no Ray, tried with tiny sizes; and the table of their results."""

import importlib
import json
import sys

import pytest
import torch

from helpers import unet
from tests.benchmarks import gpu_all, gpu_step, record, roofline, table

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """The folder that results are written into."""
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


TINY = ["--unet", "tiny", "--resolution", "32", "--steps", "1"]


@pytest.mark.slow
def test_the_gpu_benchmark_measures_each_setting(monkeypatch, capsys, results):
    """And tells what the fastest spends its time on; on a CPU here, where nothing is compiled."""

    def fail(train_step):
        raise RuntimeError("no such backend")

    settings = dict(list(gpu_step.SETTINGS.items())[:3]) | {"fails": gpu_step.Setting(prepare=fail)}
    monkeypatch.setattr(gpu_step, "SETTINGS", settings)
    monkeypatch.setattr(gpu_step, "CONTROLS", dict(list(gpu_step.CONTROLS.items())[:1]))
    monkeypatch.setattr(sys, "argv", ["gpu_step", *TINY, "--batch", "2", "4"])
    gpu_step.main()
    said = capsys.readouterr().out
    assert "failed: fails, batch 2: RuntimeError: no such backend" in said
    assert "where the time of the fastest goes" in said and "convolution" in said
    found = json.loads((results / "gpu_step.json").read_text())
    rows = found["details"]["settings"]["32"]
    measured = [(row["setting"], row["batch"]) for row in rows]
    best = max(rows[: len(gpu_step.SETTINGS) - 1], key=lambda row: row["images/s"])["setting"]
    expected = [(name, 2) for name in gpu_step.SETTINGS if name != "fails"]
    assert measured == [*expected, (best, 4), *((name, 2) for name in gpu_step.CONTROLS)]
    assert all(row["of roofline"] > 0 for row in rows) and "images/s" in next(iter(found["summary"].values()))
    assert set(found["details"]["ceilings"]) == {"matrix product", "bytes", "convolution", "attention"}


@pytest.mark.slow
def test_each_result_is_written_when_it_is_there(monkeypatch, results):
    """So that one that crashes the process costs nothing else; and after the last minute none is begun."""

    def crash(train_step):
        raise KeyboardInterrupt

    first = next(iter(gpu_step.SETTINGS.items()))
    monkeypatch.setattr(gpu_step, "SETTINGS", {first[0]: first[1], "crashes": gpu_step.Setting(prepare=crash)})
    monkeypatch.setattr(sys, "argv", ["gpu_step", *TINY, "--batch", "2"])
    with pytest.raises(KeyboardInterrupt):
        gpu_step.main()
    torch.distributed.destroy_process_group()
    rows = json.loads((results / "gpu_step.json").read_text())["details"]["settings"]["32"]
    assert [row["setting"] for row in rows] == [first[0]]
    monkeypatch.setattr(sys, "argv", ["gpu_step", *TINY, "--minutes", "0"])
    (results / "gpu_step.json").unlink()
    gpu_step.main()
    assert not (results / "gpu_step.json").exists()


def test_a_batch_that_does_not_fit_is_halved(monkeypatch, results):
    tried = []

    def measure_step(config, *_, **__):
        tried.append(config.global_batch_size)
        if config.global_batch_size > 3:
            raise torch.OutOfMemoryError("no memory left")
        return {"images/s": 5.0, "MFU": 0.5, "peak memory, GiB": 1.0, "kinds": [{"kind": "norm"}]}

    monkeypatch.setattr(gpu_step.ablations, "measure_step", measure_step)
    monkeypatch.setattr(sys, "argv", ["gpu_step", *TINY, "--batch", "8", "2", "16"])
    gpu_step.main()
    assert tried[:4] == [8, 4, 2, 2] and tried.count(16) == 1 and tried.count(8) == 1
    assert len(tried) == len(gpu_step.SETTINGS) + 2 + 1 + len(gpu_step.CONTROLS)


@pytest.mark.slow
def test_plain_bf16_weights_learn_by_an_fp32_copy():
    """Updates too small for bf16 add up in the copy; losses stay near those of fp32 weights under autocast."""
    losses = {}
    for name, prepare in (("autocast", lambda train_step: None), ("plain", gpu_step.plain_bf16)):
        config = gpu_step.TrainingConfig(global_batch_size=4, resolution=32, precision="bf16", ema_start=10**9)
        manifest, units = gpu_step.ablations.random_batch(config, num_tokens=6)
        train_step = gpu_step.ablations.TrainStep(config, manifest)
        prepare(train_step)
        losses[name] = [train_step.step(number, units)["loss"] for number in range(12)]
    weights, masters = train_step.optimizer.weights, train_step.optimizer.masters
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    assert all(torch.equal(weight, master.bfloat16()) for weight, master in zip(weights, masters, strict=True))
    assert any((weight.float() != master).any() for weight, master in zip(weights, masters, strict=True))
    assert losses["plain"] == pytest.approx(losses["autocast"], rel=0.05) and losses["plain"][0] != losses["plain"][-1]


def test_blocks_compile_with_an_older_torch_too(monkeypatch):
    """PyTorch 2.11 has no `isolate_recompiles`."""
    calls = []

    def compile_module(module, **options):
        if "isolate_recompiles" in options:
            raise TypeError("compile() got an unexpected keyword argument 'isolate_recompiles'")
        calls.append(options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_module)
    monkeypatch.setattr(unet, "has_compiler", lambda: True)
    model = unet.build_unet("tiny")
    with torch._dynamo.config.patch(recompile_limit=8):  # which it raises
        gpu_step.compile_by(unet.compile_blocks, "max-autotune", model)
    blocks = len(model.down_blocks) + len(model.up_blocks) + 1
    assert calls == [{"mode": "max-autotune", "dynamic": False}] * blocks


# ---- the roofline, and everything in one command


def test_counted_work_is_that_of_the_flop_counter():
    """Forward and backward; attention's backward pass computes the scores again, which model FLOPs leave out."""
    work = roofline.step_work("tiny", 64, 2, num_tokens=6)
    flops = work[work["kind"] != "attention"]["flops"].sum()
    blocks = unet.count_flops("tiny", (4, 8, 8), (6, 128))
    attention = work[work["kind"] == "attention"]["flops"].sum()
    # Nothing is propagated to the latents, so the first convolution costs two passes, not three.
    first = 2 * 9 * 4 * 32 * 64
    assert flops + attention * 6 / 7 == pytest.approx(2 * (3e9 * blocks["gflops"].sum() - first), rel=0.02)
    assert set(work["kind"]) >= {"convolution", "matrix product", "attention", "native_group_norm", "optimizer"}


def test_the_least_time_is_bound_by_flops_or_by_bytes():
    work = roofline.pd.DataFrame(
        [("convolution", 100, 1), ("norm", 0, 30), ("matrix product", 10, 20), ("elementwise", 0, 50)],
        columns=["kind", "flops", "bytes"],
    )
    rates = {"matrix product": 10, "convolution": 5, "bytes": 10}
    assert roofline.least_seconds(work, rates).to_dict() == {"convolution": 20, "norm": 3, "matrix product": 2}
    assert roofline.least_seconds(work, rates, fused=False)["elementwise"] == 5


def test_one_command_merges_what_its_parts_left(monkeypatch, results):
    """A part that leaves nothing, and one that is killed after its first result, cost only themselves."""

    def run(name, part, seconds, folder, merge):
        assert 0 < seconds <= 540
        if name != "checks":
            monkeypatch.setenv("BENCHMARK_RESULTS", str(folder / name))
            row = {"setting": "fast", "images/s" if "step" in name else "rows/s": 2.5}
            slow = {**row, **{key: value / 2 for key, value in row.items() if key != "setting"}, "setting": "slow"}
            rows = {"512": [slow, row]} if "step" in name else [slow, row]
            record.write(part.module, {f"{name}": "2.5"}, settings=rows, ceilings={"bytes": 1e12})
            monkeypatch.setenv("BENCHMARK_RESULTS", str(results))
        merge()
        return "stopped: out of time" if name == "checks" else "ended"

    monkeypatch.setattr(gpu_all, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu_all"])
    gpu_all.main()
    found = json.loads((results / "gpu_all.json").read_text())
    assert found["summary"] == {"step-512": "2.5", "encode": "2.5", "step-256": "2.5"}
    assert found["details"]["ended"]["checks"] == "stopped: out of time" and len(found["details"]["ended"]) == 4
    text = (results / "gpu_all.md").read_text()
    assert text.index("| fast | 2.5 |") < text.index("| slow | 1.25 |") and "bytes 1 T/s" in text
    assert sum(part.share for part in gpu_all.PARTS.values()) == pytest.approx(1)


@pytest.mark.slow
def test_everything_about_a_gpu_runs_in_one_command(monkeypatch, results):
    """Its parts are processes of their own; here on a CPU, with the tiny model."""
    monkeypatch.setattr(sys, "argv", ["gpu_all", "--minutes", "8"])
    gpu_all.main()
    found = json.loads((results / "gpu_all.json").read_text())
    assert set(found["details"]["ended"].values()) == {"ended"} and set(found["details"]["parts"]) == set(gpu_all.PARTS)
    assert "## step-512, 32 pixels" in (results / "gpu_all.md").read_text()


def test_a_part_that_hangs_is_stopped(tmp_path, monkeypatch):
    part = gpu_all.Part("million_rows", "", 1, "--help", takes_minutes=False)
    merged = []
    assert gpu_all.run("hangs", part, 0.01, tmp_path, lambda: merged.append(1)) == "stopped: out of time"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("plan_two_billion", ["--files", "200", "--rows-per-file", "1000"]),
        ("read_layout", ["--rows", "128", "--rounds", "1"]),
        (
            "gpu_encode",
            ["--model", "tiny-sd", "--resolutions", "32,64", "32", "--batch", "2", "3", "--seconds", "0.02"],
        ),
        ("gpu_checks", ["--unet", "tiny", "--resolution", "32"]),
        ("host_time", ["--steps", "1", "--layers", "1"]),
        ("simulator_draws", ["--draws", "2", "--gpus", "32"]),
        pytest.param(
            "picture_quality",
            ["--rows", "300", "--scale", "0.002", "--seeds", "1", "--prompts", "4"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "scores_and_agreement",
            ["--rows", "300", "--at", "1", "2", "3", "--seeds", "1", "--prompts", "4"],
            marks=pytest.mark.slow,
        ),
        ("aspect_buckets", ["--rows", "600", "--scale", "0.002", "--prompts", "4"]),
        pytest.param("storage_cost", ["--rows", "150", "--steps", "2", "--prompts", "2"], marks=pytest.mark.slow),
    ],
)
def test_a_benchmark_runs_and_leaves_its_results(name, arguments, monkeypatch, results):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    importlib.import_module(f"tests.benchmarks.{name}").main()
    found = json.loads((results / f"{name}.json").read_text())
    assert found["command"] == f"python -m tests.benchmarks.{name} {' '.join(arguments)}"
    assert found["hardware"]["cores"] and found["summary"] and found.keys() >= {"revision", "versions", "details"}


def test_the_table_is_made_from_the_results(monkeypatch, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    monkeypatch.setattr(table, "README", readme)
    monkeypatch.setattr(sys, "argv", ["read_speed", "--rows", "8"])
    record.write("read_speed", {"reading": "5 samples/s"})
    for _ in range(2):  # it may be made again
        table.main()
        text = readme.read_text()
        assert text.startswith(f"before\n{table.BEGIN}\n| what") and text.endswith(f"{table.END}\nafter\n")
        assert "| reading | 5 samples/s | `python -m tests.benchmarks.read_speed --rows 8` | 1, " in text
        assert "old" not in text and text.count("| reading |") == 1
