"""Pictures that kill or stop the process that decodes them: marked by what follows the encoded bytes."""

import os
import pathlib
import signal
import sys
import time
from unittest import mock

from helpers.raw import images

KILLS, HANGS, RAISES = b"kills its process", b"never ends", b"raises"
SECONDS = 3.0
KILLED, LATE = "its process was killed by SIGSEGV", "took longer than 3 s to decode"
ROOT = str(pathlib.Path(__file__).parents[1])

decode_pixels = images.make_pixels


def make_pixels(data, *rest, **options):
    """`images.make_pixels`, in which some pictures have the effect of a bug in a C library."""
    if data.endswith(KILLS):
        os.kill(os.getpid(), signal.SIGSEGV)
    if data.endswith(HANGS):
        time.sleep(600)
    if data.endswith(RAISES):
        raise LookupError("a bug")
    return decode_pixels(data, *rest, **options)


def loaded_modules(data):
    return set(sys.modules)


def make_nothing(data):
    return None


def with_killing_pictures(transform):
    """A stage `transform(rows, **options)` whose child processes die of such pictures; for Ray's workers."""

    def with_these(rows, **options):
        sys.path.insert(0, ROOT)  # by which the worker, and its child, find this module
        from helpers.production.decode import isolated  # not at the top: the child would import pyarrow
        from tests import killing_pictures

        seconds = mock.patch.object(isolated, "SECONDS", killing_pictures.SECONDS)
        with seconds, mock.patch.object(images, "make_pixels", killing_pictures.make_pixels):
            return transform(rows, **options)

    return with_these
