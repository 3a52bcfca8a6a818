"""The blind side-by-side in a real browser: headless Chromium on JupyterLab, clicks and all.

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

from helpers.lesson import side_by_side
from tests import faults

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
    """`(URL of a notebook in JupyterLab, folder that its kernel works in)`."""
    folder, token = tmp_path / "work", "secret"
    folder.mkdir()
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in (MAKE, REPORT)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "judge.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--ServerApp.port_retries=0"]
    folders = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "RUNTIME", "DATA")}
    environment = {
        **os.environ,
        **folders,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    log = tmp_path / "log"
    with log.open("w") as said:
        server = subprocess.Popen(command, env=environment, stderr=said, start_new_session=True)
    try:
        # Its log says where it is running before it listens there.
        faults.wait_until(lambda: server.poll() is not None or listens(port))
        if server.poll() is not None:
            pytest.fail(f"JupyterLab did not start:\n{log.read_text()}")
        yield f"http://127.0.0.1:{port}/lab/tree/judge.ipynb?token={token}", folder
    finally:
        server.terminate()
        server.wait(60)


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def run_all_cells(page):
    page.locator("#jp-MainMenu").get_by_text("Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()


def test_a_reader_judges_pairs_by_clicks_in_jupyterlab(page, lab):
    from playwright.sync_api import expect

    expect.set_options(timeout=2 * MINUTE)
    url, folder = lab
    a, b = ([np.full((64, 64, 3), 80 * model + number, np.uint8) for number in range(3)] for model in (1, 2))
    pairs = side_by_side.pair_up(a, b, PROMPTS, seed=0)

    def model(pair, side):
        return NAMES[pair.left_model if side == "left" else 1 - pair.left_model]

    page.goto(url)
    expect(page.locator(".jp-Notebook .jp-CodeCell")).to_have_count(2)
    # JupyterLab runs nothing, and says nothing, while no kernel is connected.
    expect(page.get_by_role("button", name="Python 3 (ipykernel) | Idle")).to_be_visible()
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
        expect(next_pair).to_be_disabled()
        quality.get_by_role("button", name=better, exact=True).click()
        alignment.get_by_role("button", name=fits, exact=True).click()
        expect(next_pair).to_be_enabled()
        answers = [side if side == "no preference" else model(pair, side) for side in (better, fits)]
        expected[pair.prompt] = answers
        next_pair.click()
        expect(output.get_by_text(f"Pair {place + 1} of 3")).to_be_hidden()  # once the kernel has kept both
        kept = side_by_side.read_choices(str(folder / "choices.csv"), NAMES)
        assert kept.set_index("prompt")[["quality", "alignment"]].T.to_dict("list") == expected
    expect(output.get_by_text("All 3 pairs are judged.")).to_be_visible()

    run_all_cells(page)
    expect(reported.locator("img")).to_be_visible()
    share = side_by_side.report(kept, NAMES).loc["alignment", "preferred"]
    expect(reported.get_by_role("cell", name=f"{share:.6f}")).to_be_visible()
    if shots := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=os.path.join(shots, "side-by-side.png"))
