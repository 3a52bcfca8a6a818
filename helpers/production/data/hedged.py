"""Hedged reads: a read that takes much longer than usual is started a second time, and the first result counts.

An object store answers a few of many requests seconds late, incompletely or never. Use it on object stores:

    stream = functools.partial(latents_dataset, wrap=hedged.wrap)  # the argument `stream` of `train.source.StepSource`
"""

from __future__ import annotations

import collections
import functools
import statistics
import time
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

import pyarrow as pa

from ...latents.read import READ_THREADS, ReadRows, threads

LATE_SECONDS = 0.25  # the earliest that a read counts as late
MOST_FAILED = 3
_seconds = collections.deque([LATE_SECONDS], maxlen=64)  # durations of this process's recent reads


def wrap(read: ReadRows) -> ReadRows:
    """The same reader, hedged (`read_hedged`)."""
    return functools.partial(read_hedged, read)


def read_hedged(read: ReadRows, *arguments: Any) -> pa.Table:
    """What `read(*arguments)` returns. A call that fails, or takes three times the median, is repeated.

    A late call goes on beside its repetition. Raises the error of the third failed call; an error other than OSError
    and ArrowException at once.
    """

    def timed():
        started = time.perf_counter()
        rows = read(*arguments)
        _seconds.append(time.perf_counter() - started)
        return rows

    running, num_failed = set(), 0
    while True:
        if len(running) < 2:
            running.add(threads("hedged", 2 * READ_THREADS).submit(timed))
        late = max(LATE_SECONDS, 3 * statistics.median(_seconds))
        done, running = wait(running, late, FIRST_COMPLETED)
        for future in done:
            if future.exception() is None:
                return future.result()
            num_failed += 1
            if num_failed == MOST_FAILED or not isinstance(future.exception(), (OSError, pa.ArrowException)):
                raise future.exception()
