"""Keeps Ray Data's scheduling loop from taking a core from a trainer on the same machine."""

import time


class SchedulerThrottle:
    """Pauses Ray Data's scheduling loop while it is backpressured: it would busy-wait on tasks whose output must wait.

    On a machine that also trains, that would take a core from the trainer. Steps that return at once, because they
    wait for no task, double the pause up to 50 ms; others halve it. Implements Ray Data's execution callbacks.
    """

    def __init__(self):
        self.pause, self.resumed = 0.0, 0.0

    def before_execution_starts(self, executor):
        pass

    def on_execution_step(self, executor):
        busy_waiting = time.perf_counter() - self.resumed < 0.01
        self.pause = min(0.05, 2 * self.pause + 0.001) if busy_waiting else self.pause / 2
        time.sleep(self.pause)
        self.resumed = time.perf_counter()

    def after_execution_succeeds(self, executor):
        pass

    def after_execution_fails(self, executor, error):
        pass
