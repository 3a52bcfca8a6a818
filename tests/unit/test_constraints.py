"""What is installed is what the files pin: requirements.txt and, for what those need, helpers/constraints.txt."""

import importlib.metadata
import pathlib
import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]
CONSTRAINTS = ROOT / "helpers" / "constraints.txt"


def read_requirements(path):
    """The requirements of a file whose markers hold here."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return [one for one in found if one.marker is None or one.marker.evaluate()]


def names_of(requirements):
    """(name, extra) of requirements; "" is the package without an extra."""
    return [(canonicalize_name(one.name), extra) for one in requirements for extra in ("", *one.extras)]


def needed_packages():
    """The names of all packages that the two requirements files come to here."""
    asked = read_requirements(ROOT / "requirements.txt") + read_requirements(ROOT / "tests" / "requirements.txt")
    found, waiting = set(), names_of(asked)
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) not in found:
            found.add((name, extra))
            needs = map(Requirement, importlib.metadata.requires(name) or [])
            waiting += names_of(one for one in needs if one.marker is None or one.marker.evaluate({"extra": extra}))
    return {name for name, _ in found}


def test_every_package_is_pinned_and_installed_in_that_version():
    """But torch and its build's own. If not: .github/CONTRIBUTING.md has the command that makes the constraints."""
    pins = {canonicalize_name(one.name): one.specifier for one in read_requirements(CONSTRAINTS)}
    names = {name for name in needed_packages() if not re.match("torch$|triton$|nvidia-|cuda-", name)}
    assert len(names) > 100
    assert not names - pins.keys()
    versions = {name: importlib.metadata.version(name) for name in names}
    assert not {name: version for name, version in versions.items() if version not in pins[name]}


def test_each_platform_has_one_version_of_a_package():
    assert len(read_requirements(CONSTRAINTS)) == len({one.name for one in read_requirements(CONSTRAINTS)})
    assert "sys_platform == 'win32'" in CONSTRAINTS.read_text() and "://" not in CONSTRAINTS.read_text()


def test_the_constraints_are_used_wherever_the_requirements_are():
    """`pip` finds them beside requirements.txt, in the image too."""
    assert "\n-c helpers/constraints.txt\n" in (ROOT / "requirements.txt").read_text()
    dockerfile = (ROOT / "helpers/clusters/Dockerfile").read_text()
    assert dockerfile.index("COPY --chown=ray helpers/constraints.txt helpers/") < dockerfile.index("pip install")
