"""In a real browser, headless Chromium on JupyterLab: the blind side-by-side, and a reader's first run.

Not part of the default run: `pytest tests -m browser`, after `pip install -r tests/browser.txt`.
"""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import nbformat
import numpy as np
import pytest
import ray

from helpers import cluster
from helpers.lesson import side_by_side
from tests import faults
from tests.pipelines import draw_and_encode

pytestmark = pytest.mark.browser
ROOT = pathlib.Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Without these, Chromium asks hosts of its maker at every start; as root it has no sandbox.
OFFLINE = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
MINUTE = 60_000  # milliseconds
NAMES = ("model-early", "model-late")
PROMPTS = [f"a <b>red</b> square & {number} circles" for number in range(3)]

MAKE = f"""
import numpy as np
from helpers.lesson import figures, side_by_side
prompts, names = {PROMPTS!r}, {NAMES!r}
a, b = ([np.full((64, 64, 3), 80 * model + number, np.uint8) for number in range(3)] for model in (1, 2))
pairs = side_by_side.pair_up(a, b, prompts, seed=0)
judging = side_by_side.SideBySide(pairs, "choices.csv", names)
judging
"""
REPORT = """
if len(judging.choices):
    report = side_by_side.report(judging.choices, judging.names)
    display(report, figures.preferences(report, title="choices"))
"""


@pytest.fixture(scope="module")
def page():
    """A page of a headless browser; the test is skipped, and says why, where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("playwright is not installed: pip install -r tests/browser.txt")
    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        if path is None and not os.path.exists(playwright.chromium.executable_path):
            pytest.skip(f"none of {', '.join(BROWSERS)} is there: install one, or run `playwright install chromium`")
        arguments = [*OFFLINE, *(["--no-sandbox"] if os.getuid() == 0 else [])]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 1600})
            page.set_default_timeout(2 * MINUTE)
            yield page
        finally:
            browser.close()


@pytest.fixture
def lab(tmp_path):
    """A function: (cells, name) -> the URL of a notebook with these cells, which nobody has trusted, in JupyterLab.

    Its kernel works in `tmp_path`/work. All cells are in the page at once.
    """
    folder, token = tmp_path / "work", "secret"
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--ServerApp.port_retries=0"]
    folders = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "RUNTIME", "DATA")}
    settings = tmp_path / "CONFIG" / "lab" / "user-settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    environment = {
        **os.environ,
        **folders,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    log = tmp_path / "log"
    with log.open("w") as said:
        server = subprocess.Popen(command, env=environment, stderr=said, start_new_session=True)

    def open_notebook(cells, name):
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / name)
        return f"http://127.0.0.1:{port}/lab/tree/{name}?token={token}"

    try:
        # Its log says where it is running before it listens there.
        faults.wait_until(lambda: server.poll() is not None or listens(port))
        if server.poll() is not None:
            pytest.fail(f"JupyterLab did not start:\n{log.read_text()}")
        yield open_notebook
    finally:
        server.terminate()
        server.wait(60)


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def click_menu(page, menu, entry):
    page.locator("#jp-MainMenu").get_by_text(menu, exact=True).click()
    page.get_by_text(entry, exact=True).click()


def run_all_cells(page):
    click_menu(page, "Run", "Run All Cells")


def open_page(page, url, num_cells):
    """JupyterLab runs nothing, and says nothing, while no kernel is connected."""
    from playwright.sync_api import expect

    expect.set_options(timeout=2 * MINUTE)
    page.goto(url)
    expect(page.locator(".jp-Notebook .jp-CodeCell")).to_have_count(num_cells)
    expect(page.get_by_role("button", name="Python 3 (ipykernel) | Idle")).to_be_visible()
    return expect


def test_a_reader_judges_pairs_by_clicks_in_jupyterlab(page, lab, tmp_path):
    folder = tmp_path / "work"
    a, b = ([np.full((64, 64, 3), 80 * model + number, np.uint8) for number in range(3)] for model in (1, 2))
    pairs = side_by_side.pair_up(a, b, PROMPTS, seed=0)

    def model(pair, side):
        return NAMES[pair.left_model if side == "left" else 1 - pair.left_model]

    cells = [nbformat.v4.new_code_cell(source.strip()) for source in (MAKE, REPORT)]
    expect = open_page(page, lab(cells, "judge.ipynb"), 2)
    run_all_cells(page)
    output, reported = (page.locator(".jp-CodeCell").nth(number).locator(".jp-OutputArea-output") for number in (0, 1))
    quality, alignment = (page.locator(".widget-toggle-buttons").nth(number) for number in (0, 1))
    next_pair = page.get_by_role("button", name="Next")

    clicks = [("left", "right"), ("no preference", "left"), ("right", "right")]
    expected = {}
    for place, (pair, (better, fits)) in enumerate(zip(pairs, clicks, strict=True)):
        if place == 2:  # a notebook that is run again goes on where the reader was
            run_all_cells(page)
        expect(output.get_by_text(f"Pair {place + 1} of 3")).to_be_visible()
        expect(output.get_by_text(pair.prompt, exact=True)).to_be_visible()
        pictures = output.locator("img")
        expect(pictures).to_have_count(2)
        # What the browser has drawn: the pair's two pictures, enlarged, each on its side.
        drawn = pictures.evaluate_all(
            """images => images.map(image => {
                const canvas = document.createElement('canvas');
                canvas.getContext('2d').drawImage(image, 0, 0);
                return [image.naturalWidth, canvas.getContext('2d').getImageData(9, 9, 1, 1).data[0]];
            })"""
        )
        left, right = pair.by_model[pair.left_model], pair.by_model[1 - pair.left_model]
        assert drawn == [[320, int(left[0, 0, 0])], [320, int(right[0, 0, 0])]]
        assert not re.search("|".join(NAMES), " ".join(output.all_inner_texts()))  # the reader cannot tell
        next_pair.click()
        expect(output.get_by_text("Answer both questions first.")).to_be_visible()
        quality.get_by_role("button", name=better, exact=True).click()
        alignment.get_by_role("button", name=fits, exact=True).click()
        answers = [side if side == "no preference" else model(pair, side) for side in (better, fits)]
        expected[pair.prompt] = answers
        next_pair.click()
        expect(output.get_by_text(f"Pair {place + 1} of 3")).to_be_hidden()  # once the kernel has kept both
        if place < 2:
            expect(next_pair).to_be_focused()  # by the keyboard a reader goes on from there
        kept = side_by_side.read_choices(str(folder / "choices.csv"), NAMES)
        assert kept.set_index("prompt")[["quality", "alignment"]].T.to_dict("list") == expected
    expect(output.get_by_text("All 3 pairs are judged.")).to_be_visible()

    run_all_cells(page)
    expect(reported.locator("img")).to_be_visible()
    share = side_by_side.report(kept, NAMES).loc["alignment", "preferred"]
    expect(reported.get_by_role("cell", name=f"{share:.6f}")).to_be_visible()
    if shots := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=os.path.join(shots, "side-by-side.png"))


PARAMETERS = """
resolution, max_steps, warmup_steps, checkpoint_every, validate_every = 32, 600, 2, 20, 0
global_batch_size, validation_share, sampling_steps, prompts = 16, 0.05, 2, ["a red circle", "a blue square"]
"""


@pytest.fixture
def cells(no_shared_cluster, tmp_path):
    """The cells of `first_run`, in the folder of the kernel."""
    return first_run(tmp_path / "work")


def first_run(folder):
    """Training.ipynb's cells that train and look, and its prompt box; latents of drawn pictures in `folder`/storage."""
    cluster.connect("local", num_cpus=2)
    draw_and_encode(folder / "storage", 320)
    ray.shutdown()
    pictures = folder / "helpers" / "lesson"
    pictures.mkdir(parents=True)
    shutil.copy(ROOT / "helpers" / "lesson" / "architecture.svg", pictures)
    cells = []
    for cell in nbformat.read(ROOT / "Training.ipynb", as_version=4).cells:
        if "PromptBox(" in cell.source:
            cell.source = "on_device(export_checkpoint, config, checkpoint)\nprompt_box.PromptBox(config)"
        left_out = re.search(r"^# section|\bafter(\[| = )|if detector|draw_with_diffusers", cell.source)
        if "architecture.svg" in cell.source or (cell.cell_type == "code" and not left_out):
            cells.append(cell)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if "parameters" in cell.metadata.get("tags", []):
            cells.append(nbformat.v4.new_code_cell(PARAMETERS.strip()))
    return cells


def test_a_reader_opens_trains_stops_goes_on_restarts_and_draws(page, lab, cells):
    sources = [cell.source for cell in cells if cell.cell_type == "code"]

    def place(text):
        (found,) = [number for number, source in enumerate(sources) if text in source]
        return found

    def output(text):
        return page.locator(".jp-CodeCell").nth(place(text)).locator(".jp-OutputArea-output")

    def run(text):
        expect(idle).to_be_visible()  # a kernel that was interrupted leaves out what comes before it is idle
        page.locator(".jp-CodeCell").nth(place(text)).locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")

    idle = page.get_by_role("button", name="Python 3 (ipykernel) | Idle")
    expect = open_page(page, lab(cells, "Training.ipynb"), len(sources))
    expect.set_options(timeout=5 * MINUTE)  # a training run, on a machine that may be busy
    diagram = page.locator("img[alt^='Diagram']")
    expect(diagram).to_be_visible()  # though the notebook is not trusted
    assert diagram.evaluate("image => image.naturalWidth") > 0

    run_all_cells(page)
    expect(output(".fit()").get_by_text("starting the workers")).to_be_visible()
    expect(output(".fit()").get_by_text(re.compile(r"run laptop: [1-5]\d\d of 600 steps"))).to_be_visible()
    click_menu(page, "Kernel", "Interrupt Kernel")
    stopped = output(".fit()").get_by_text(re.compile(r"Stopped after step \d+\. Running this cell again goes on"))
    expect(stopped).to_be_visible()
    assert "Traceback" not in " ".join(output(".fit()").all_inner_texts())

    run(".fit()")
    expect(output(".fit()").get_by_text(re.compile("last checkpoint: checkpoint-000000600"))).to_be_visible()
    run(".fit()")
    expect(output(".fit()").get_by_text("Nothing to do: the run laptop finished its 600 steps")).to_be_visible()

    click_menu(page, "Kernel", "Restart Kernel and Clear Outputs of All Cells…")
    page.get_by_role("button", name="Confirm").click()
    expect(idle).to_be_visible()
    run("looks.catch_up()")
    run("run_over_time(")
    expect(output("run_over_time(").locator("img")).to_be_visible()
    run("PromptBox")
    prompt = output("PromptBox").locator("input[type=text]")
    prompt.fill("a large red circle")
    prompt.press("Enter")
    expect(output("PromptBox").get_by_text("a large red circle")).to_be_visible()
    expect(output("PromptBox").locator("img")).to_be_visible()
    if shots := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=os.path.join(shots, "prompt-box.png"))
