"""The benchmarks that need no Ray, tried with tiny sizes on a CPU; and the table of their results."""

import importlib.util
import json
import pathlib
import re
import sys

import pytest
import torch

from helpers.lesson import step_costs
from tests.benchmarks import blur_causes, gpu_all, gpu_step, record, resume_exactness, roofline, table, time_to_quality

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """The folder that results are written into."""
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("picture_quality", "--rows 300 --scale 0.002 --seeds 1 --prompts 4"),
        ("time_to_quality", "--rows 300 --scale 0.002 --seeds 1 --prompts 4"),
        ("plan_two_billion", "--files 200 --rows-per-file 1000"),
        ("scores_and_agreement", "--rows 200 --at 1 2 --seeds 1 --prompts 2"),
        ("checkpoint_cost", "--gigabytes 0.2 --rounds 1"),
        ("storage_cost", "--rows 150 --steps 2 --prompts 2"),
        ("read_layouts", "--rows 8 --rounds 1 --side 64 --files 40"),
    ],
)
def test_a_benchmark_runs_and_leaves_its_results(name, arguments, monkeypatch, results):
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    importlib.import_module(f"tests.benchmarks.{name}").main()
    found = json.loads((results / f"{name}.json").read_text())
    assert found["command"] == f"python -m tests.benchmarks.{name} {arguments}"
    assert found["hardware"]["cores"] and found["summary"] and found.keys() >= {"revision", "versions", "details"}
    assert [path.name for path in results.iterdir()] == [f"{name}.json"]


def test_a_changed_yardstick_begins_a_new_table_of_records():
    time_to_quality.check_locked(time_to_quality.LOCKED)
    with pytest.raises(SystemExit, match="The prompts are not those of the records"):
        time_to_quality.check_locked({**time_to_quality.LOCKED, "prompts": "0"})


@pytest.mark.slow
def test_each_cause_of_blur_leaves_its_scores_and_its_images(monkeypatch, results, tmp_path):
    pictures = tmp_path / "pictures"
    arguments = ["--rows", "210", "--scale", "0.002", "--prompts", "6", "--pictures", str(pictures)]
    monkeypatch.setattr(sys, "argv", ["blur_causes", *arguments])
    blur_causes.main()
    settings = json.loads((results / "blur_causes.json").read_text())["details"]["settings"]
    assert settings.keys() == blur_causes.CAUSES.keys()
    assert {path.name for path in pictures.iterdir()} == {f"blurry-{cause}.png" for cause in settings}
    assert settings["vae"]["real"]["right"] == 1 > settings["vae"]["generated"]["right"]


def test_a_missing_environment_is_one_sentence_with_the_command_that_makes_it(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["resume_exactness", "--tools", "litdata", "--environments", str(tmp_path)])
    with pytest.raises(SystemExit) as error:
        resume_exactness.main()
    pip = f"{tmp_path}/litdata/bin/pip install --no-compile litdata=="
    assert f"python3 -m venv {tmp_path}/litdata && {pip}" in str(error.value) and "\n" not in str(error.value)


def test_a_resumed_run_is_counted_against_the_undisturbed_one():
    """Two steps of two rows an epoch; the checkpoint is that of step 3, and step 3 was taken before the kill."""

    def steps(first, *ids):
        return {first + i: resume_exactness.Step((first + i) // 2, rows, 0.0, 5) for i, rows in enumerate(ids)}

    undisturbed = steps(0, [0, 1], [2, 3], [1, 2], [0, 3])
    exact = resume_exactness.compare(undisturbed, undisturbed, steps(3, [0, 3]))
    assert exact == dict.fromkeys(exact, 0) | {"resumed at step": 3, "batches": 1, "rows read again": 5}
    again = resume_exactness.compare(undisturbed, undisturbed, steps(3, [1, 2]))
    assert (again["batches that differ"], again["rows twice"], again["rows never"]) == (1, 2, 2)


# ---- on a GPU: what a CPU can try of it

PARTS = ["checks-eager", "encode-eager", "step-512-eager"]


@pytest.mark.slow
def test_everything_about_a_gpu_runs_by_one_command(monkeypatch, results):
    """Its parts are processes of their own: each setting of the step and of encoding, and the checks."""
    monkeypatch.setattr(sys, "argv", ["gpu_all", *PARTS])
    gpu_all.main()
    rows = {}
    for name in PARTS:
        details = json.loads((results / name / f"{gpu_all.PARTS[name].module}.json").read_text())["details"]
        assert details["failed"] == [] and details["in_progress"] is None
        rows[name] = details["rows"]
    assert {row["setting"] for row in rows["step-512-eager"]} == set(gpu_step.SETTINGS)
    assert {row["check"] for row in rows["checks-eager"]} == set(gpu_all.PARTS["checks-eager"].arguments.split()[1:])
    assert all(row["passed"] for row in rows["checks-eager"])


def test_a_benchmark_that_is_killed_leaves_every_finished_line(results):
    def killed():
        raise KeyboardInterrupt

    rows = record.Rows("gpu_step", lambda rows: {"what": f"{len(rows)} rows"})
    rows.add({"setting": "base"}, lambda: {"images/s": 5.0})
    rows.add({"setting": "flash"}, lambda: {"images/s": 6.0})
    with pytest.raises(KeyboardInterrupt):
        rows.add({"setting": "cudnn"}, killed)
    found = json.loads((results / "gpu_step.json").read_text())
    assert found["summary"] == {"what": "2 rows"} and found["details"]["in_progress"] == {"setting": "cudnn"}
    assert [row["images/s"] for row in found["details"]["rows"]] == [5.0, 6.0] and found["details"]["failed"] == []


def test_a_part_that_hangs_is_ended_after_its_time(tmp_path):
    assert gpu_all.run(gpu_all.Part("million_rows", "", "--help"), tmp_path, 0.01) == "ended after its time"


def test_a_batch_that_does_not_fit_is_halved_and_a_setting_that_fails_is_passed_over(monkeypatch, results):
    tried = []

    def measure_step(config, *_, **__):
        tried.append(config.global_batch_size)
        if len(tried) == 4:
            raise RuntimeError("no such kernel")
        if config.global_batch_size > 3:
            raise torch.OutOfMemoryError("no memory left")
        return {"images/s": 5.0, "MFU": 0.5, "peak memory, GiB": 1.0, "kinds": [{"kind": "norm"}]}

    monkeypatch.setattr(gpu_step.ablations, "measure_step", measure_step)
    monkeypatch.setattr(sys, "argv", ["gpu_step", "--unet", "tiny", "--resolution", "32", "--batch", "8", "2", "16"])
    gpu_step.main()
    assert tried[:4] == [8, 4, 2, 2] and tried.count(16) == tried.count(8) == 1
    details = json.loads((results / "gpu_step.json").read_text())["details"]
    assert len(details["rows"]) == len(gpu_step.SETTINGS) - 1
    out_of_memory = "OutOfMemoryError: no memory left"
    errors = [row["error"] for row in details["failed"]]
    assert errors == [out_of_memory, out_of_memory, "RuntimeError: no such kernel", out_of_memory]


def test_counted_work_is_that_of_the_flop_counter():
    """Forward and backward; attention's backward pass computes the scores again, which model FLOPs leave out."""
    work = roofline.step_work("tiny", 64, 2, num_tokens=6)
    flops = work[work["kind"] != "attention"]["flops"].sum()
    blocks = step_costs.count_flops("tiny", (4, 8, 8), (6, 128))
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


# ---- results


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


def test_the_table_of_results_is_what_the_files_say(monkeypatch):
    """If not: `python -m tests.benchmarks.table`."""
    monkeypatch.delenv("BENCHMARK_RESULTS")
    _, _, rest = table.README.read_text().partition(table.BEGIN)
    assert rest.partition(table.END)[0].strip().splitlines() == table.lines()


def test_each_number_measured_in_the_readme_is_in_the_results_that_it_names():
    """Digit for digit."""
    _, _, rest = (record.ROOT / "README.md").read_text().partition("| what | measured |\n|---|---|\n")
    lines, number = rest.partition("\n\n")[0].splitlines(), re.compile(r"\d[\d.,]*\d|\d")
    assert len(lines) >= 3
    for line in lines:
        row = re.fullmatch(r"\| \[.+\]\((tests/benchmarks/results/\w+\.json)\).* \| (.+) \|", line)
        assert row, line
        summary = json.loads((record.ROOT / row[1]).read_text())["summary"]
        known = number.findall(" ".join([*summary, *summary.values()]))
        assert set(number.findall(row[2])) <= set(known), line


def test_every_command_that_a_text_names_exists():
    """`python -m tests...` in Markdown and notebooks."""
    texts = [
        path for pattern in ("*.md", "*.ipynb") for path in record.ROOT.rglob(pattern) if ".venv" not in path.parts
    ]
    named = {(name, path.name) for path in texts for name in re.findall(r"-m (tests[.\w]*\w)", path.read_text())}
    assert len(named) > 20
    for module, path in named - {("tests.benchmarks.NAME", "CONTRIBUTING.md")}:
        spec = importlib.util.find_spec(module)
        assert spec and "__main__" in pathlib.Path(spec.origin).read_text(), f"{path}: {module}"


def test_the_benchmarks_page_names_each_benchmark_and_no_number_without_results():
    text = table.README.read_text()
    commands = {path.stem for path in table.README.parent.glob("*.py") if "def main" in path.read_text()}
    assert set(re.findall(r"tests\.benchmarks\.(\w+)", text)) == commands
    before, _, rest = text.partition(table.BEGIN)
    results, _, after = rest.partition(table.END)
    stored = {path.stem for path in (record.ROOT / "tests/benchmarks/results").rglob("*.json")}
    assert set(re.findall(r"tests\.benchmarks\.(\w+)", results)) == stored
    without, _, _ = after.partition("## Commands without")[2].partition("Results of GPUs")
    assert set(re.findall(r"tests\.benchmarks\.(\w+)", without)) == commands - stored - {"table"}
    assert not re.findall(r"\d", re.sub(r"`[^`]*`", "", before + after))
    code = {name for name in re.findall(r"`(\w+)(?: --[^`]*)?`", after) if name.islower()}
    assert code <= commands | {"helpers"}, code - commands


def test_the_page_about_blur_shows_what_was_measured():
    """Each cause has a section with its image, its command and the table of its scores."""
    found = json.loads((record.ROOT / "tests/benchmarks/results/blur_causes.json").read_text())["details"]
    page = record.ROOT / "helpers/docs/BLURRY.md"
    sections = page.read_text().split("\n## ")
    assert all(prompt in sections[0] for prompt in found["shown"])
    assert set(re.findall(r"\(pictures/blurry-(\w+)\.png\)", page.read_text())) == found["settings"].keys()
    for cause, scores in found["settings"].items():
        (section,) = (text for text in sections if f"(pictures/blurry-{cause}.png)" in text)
        assert f"`python -m tests.benchmarks.blur_causes {cause}`" in section
        table = [f"| {name} | {score['right']:.3f} | {score['overlap']:.3f} |" for name, score in scores.items()]
        assert re.findall(r"^\| .* \d.*$", section, re.MULTILINE) == table
        assert (page.parent / "pictures" / f"blurry-{cause}.png").stat().st_size <= 60_000
