"""The memory of a process at its peak. Imports nothing that would take memory, or seconds, itself."""

import pathlib

ROOT = pathlib.Path(__file__).parents[1]


def peak_kib():
    """KiB of this process's memory at its peak so far. `ru_maxrss` would count what its parent had when it began."""
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
