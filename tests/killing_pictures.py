"""Pictures that kill or stop the process that decodes them: marked by what follows the encoded bytes."""

import os
import signal
import sys
import time

from helpers.raw import images

KILLS, HANGS, RAISES = b"kills its process", b"never ends", b"raises"
KILLED = "its process was killed by SIGSEGV"

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
