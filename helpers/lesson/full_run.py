"""The full Stable Diffusion v2 run: how it differs from a notebook's parameters, and the command that starts it.

Its parameters, with their sources, are files that papermill reads (`papermill -f`): `helpers/profiles/`. A profile
serves all three notebooks.
"""

import os
import pathlib
import shlex
from typing import Any

import pandas as pd
import yaml

PROFILES = pathlib.Path(__file__).parents[1] / "profiles"


def read_profile(name: str) -> dict[str, Any]:
    """The parameters of a profile, such as "laptop" or "full-sd2-256". ValueError for an unknown one."""
    path = PROFILES / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(repr(found.stem) for found in PROFILES.glob("*.yaml")))
        raise ValueError(f"profile={name!r} is unknown: choose one of {known}.")
    return yaml.safe_load(path.read_text())


# By resolution: phase 1 at 256 pixels, then phase 2. A parameter that is missing here keeps the notebook's value.
PARAMETERS = {resolution: read_profile(f"full-sd2-{resolution}") for resolution in (256, 512)}
# {group: {parameter: why the full run differs}}
_WHY = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())


def compare_parameters(parameters: dict) -> pd.DataFrame:
    """What the full run changes in a notebook's `parameters` (name -> value), one row each, grouped by subject.

    Columns: "this notebook", "full run, 256 px", "full run, 512 px", "why".
    """
    rows = {}
    for group, whys in _WHY.items():
        for name, why in whys.items():
            here = parameters.get(name)
            full = [of_phase.get(name, here) for of_phase in PARAMETERS.values()]
            if name in parameters and full != [here, here]:
                rows[group, name] = [here, *full, why]
    columns = ["this notebook", "full run, 256 px", "full run, 512 px", "why"]
    index = pd.MultiIndex.from_tuples(rows, names=["group", "parameter"]) if rows else None
    return pd.DataFrame(list(rows.values()), columns=columns, index=index, dtype=object)


def command(notebook: str, parameters: dict, resolution: int, output: str) -> str:
    """The shell command that runs `notebook` as the full run, on the cluster that this machine is part of.

    It names the locations among the notebook's `parameters`: change these. `resolution`: 256 or 512, else ValueError.
    """
    if resolution not in PARAMETERS:
        raise ValueError(f"resolution={resolution!r} is not a phase of the full run: choose 256 or 512.")
    profile = os.path.relpath(PROFILES / f"full-sd2-{resolution}.yaml")
    parts = [["papermill", notebook, output, "--inject-output-path"], ["-f", profile]]
    full = PARAMETERS[resolution]
    parts += [["-p", name, full[name]] for name in ("input_uri", "storage") if name in parameters]
    return " \\\n    ".join(shlex.join(part) for part in parts)
