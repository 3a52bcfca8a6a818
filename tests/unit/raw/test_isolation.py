"""A picture that kills its process, or never ends, costs its own row; what the child cannot do is raised here."""

import contextlib
import functools
import os
import pickle
import select
import subprocess
import sys

import pytest

from helpers.production.decode import isolated
from helpers.raw import images
from tests import killing_pictures
from tests.killing_pictures import HANGS, KILLED, KILLS, RAISES
from tests.unit.raw.test_images import encoded, photograph

SHAPES = {64: [(64, 64)]}
GOOD = encoded(photograph(64, 64), "PNG")
work = functools.partial(killing_pictures.make_pixels, shapes=SHAPES)


def run(*pictures, seconds=60):
    return isolated.run_apart(work, [(picture,) for picture in pictures], seconds)


def reasons(results):
    return [str(result) if isinstance(result, isolated.Lost) else result[1] for result in results]


def test_a_picture_that_kills_its_process_is_named_and_all_others_are_done():
    found = run(GOOD, GOOD + KILLS, GOOD, b"", GOOD + KILLS, GOOD + KILLS, GOOD, b"broken")
    assert reasons(found) == ["", KILLED, "", "no image bytes", KILLED, KILLED, "", "not an image"]
    expected = images.make_pixels(GOOD, shapes=SHAPES)[0]
    assert all((found[place][0][64, 64] == expected[64, 64]).all() for place in (0, 2, 6))


def test_a_picture_that_takes_too_long_is_rejected():
    assert reasons(run(GOOD, GOOD + HANGS, GOOD, seconds=2)) == ["", "took longer than 2 s to decode", ""]


def test_other_errors_are_raised_and_the_next_pictures_are_done():
    with pytest.raises(LookupError, match="a bug"):
        run(GOOD, GOOD + RAISES, GOOD)
    assert reasons(run(GOOD)) == [""]


def test_a_child_that_cannot_start_is_an_error(monkeypatch, tmp_path):
    isolated.forget_child()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        run(GOOD)


PARENT = """
import os, signal
from helpers.production.decode import isolated
from tests import killing_pictures

isolated.run_apart(killing_pictures.make_nothing, [(b"",)], 60)
print(isolated.child.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_child_ends_when_its_parent_is_killed():
    done = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, timeout=120)
    with contextlib.suppress(ProcessLookupError):  # it is gone
        assert select.select([os.pidfd_open(int(done.stdout))], [], [], 30)[0]


LOADED = """
from helpers.production.decode import isolated
from tests import killing_pictures

(found,) = isolated.run_apart(killing_pictures.loaded_modules, [(b"",)], 60)
print({"pyarrow", "ray", "transformers", "pandas"} & found, "PIL" in found)
"""


def test_the_child_loads_only_what_decodes():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120)
    assert done.stdout == "set() True\n", done.stderr


def test_a_lost_image_is_rejected_again_for_the_same_reason(tmp_path, monkeypatch):
    """By another process that would not lose it: a rerun, or the next epoch, has the same rows."""
    decode = pickle.loads(pickle.dumps(isolated.decoder(str(tmp_path / "lost"))))
    calls = [(data, images.center_crop, None) for data in (GOOD, GOOD + HANGS, GOOD + KILLS)]
    monkeypatch.setattr(isolated, "SECONDS", 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(images, "make_pixels", killing_pictures.make_pixels)
        first = decode(calls, SHAPES)
    isolated.crashes.cache_clear()
    again = decode(calls, SHAPES)
    expected = ["", "took longer than 2 s to decode", KILLED]
    assert [one.reason for one in first] == expected == [one.reason for one in again]
    assert [list(one.pixels) for one in again] == [[(64, 64)], [], []]
