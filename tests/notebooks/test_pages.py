"""The README and the pages that it leads to: their links and their commands."""

import importlib.util
import pathlib
import re
import shlex

import pytest
import yaml

from helpers.config import PreprocessingConfig, TrainingConfig
from tests.execute_notebooks import NOTEBOOKS, ROOT
from tests.pipelines import defaults, filled

PAGES = ["README.md", "helpers/clusters/README.md", ".github/SECURITY.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("helpers/docs/*.md"))


def commands(page):
    """The shell commands of a page, each a list of words."""
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").replace("&&\n", "&& ").splitlines()
    return [shlex.split(command, comments=True) for line in lines for command in re.split(" && | ; ", line)]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_sections_and_modules_exist(page):
    text = (ROOT / page).read_text()
    for target, section in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if section else []
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not section or section in anchors, (target, section)
    commands = re.sub(r".*script at commit.*", "", text)  # results whose script is not here any more
    for module in re.findall(r"python -m ((?:tests|helpers)\.[a-z_.]+[a-z_])", commands):
        assert importlib.util.find_spec(module), module


def papermill_calls():
    """(notebook, {parameter: value}) of each papermill command of all pages, as papermill reads them."""
    for words in (words for page in PAGES for words in commands(page)):
        if not words or pathlib.Path(words[0]).name != "papermill":
            continue
        notebook, given, options = words[1], {}, iter(words[3:])
        for option in options:
            if option == "-p":
                name, value = next(options), next(options)
                given[name] = None if value == "None" else yaml.safe_load(value)
            elif option == "-y":
                given |= yaml.safe_load(next(options))
            elif option == "-f":  # a profile serves all notebooks
                profile = yaml.safe_load((ROOT / next(options)).read_text())
                given |= {name: value for name, value in profile.items() if name in defaults(notebook)}
        yield notebook, given


def test_papermill_commands_set_parameters_of_their_notebook_to_values_that_it_takes():
    for name, given in papermill_calls():
        assert given.keys() <= defaults(name).keys(), (name, given)
        config = PreprocessingConfig if name == NOTEBOOKS[0] else TrainingConfig
        config.from_parameters({**defaults(name), **filled(given)})
