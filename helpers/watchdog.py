"""A thread that ends a process which makes no progress, as MosaicML's watchdog does, so that it is replaced."""

import faulthandler
import os
import signal
import threading
import time


class Watchdog:
    """Kills this process when `beat` has not been called for `timeout` seconds.

    A worker that waits for ever in a collective, or for a file system that does not answer, looks alive from outside.
    Until the first beat it has ten times as long: compiling, and the first batch, take their time.

    Args:
        timeout: seconds.
        on_hang: called with the seconds without progress, before the process ends; it has ten seconds, since what it
            writes to may be what hangs.
    """

    def __init__(self, timeout, on_hang=None):
        self.timeout, self.on_hang = timeout, on_hang
        self.last, self.limit = time.monotonic(), 10 * timeout
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)

    def beat(self):
        self.last, self.limit = time.monotonic(), self.timeout

    def watch(self):
        while not self.stop.wait(min(1.0, self.timeout / 10)):
            silent = time.monotonic() - self.last
            if silent > self.limit:
                try:
                    faulthandler.dump_traceback()  # where it hangs, into the worker's log
                    if self.on_hang:
                        telling = threading.Thread(target=self.on_hang, args=(silent,), daemon=True)
                        telling.start()
                        telling.join(10)
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
