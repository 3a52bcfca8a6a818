"""Callbacks of Ray Data's scheduling loop: they keep it from taking a core from a trainer, and its memory small."""

import time


class ExecutionCallback:
    """Ray Data's execution callbacks; none does anything."""

    def before_execution_starts(self, executor):
        pass

    def on_execution_step(self, executor):
        pass

    def after_execution_succeeds(self, executor):
        pass

    def after_execution_fails(self, executor, error):
        pass


class SchedulerThrottle(ExecutionCallback):
    """Pauses Ray Data's scheduling loop while it is backpressured: it would busy-wait on tasks whose output must wait.

    On a machine that also trains, that would take a core from the trainer. Steps that return at once, because they
    wait for no task, double the pause up to 50 ms; others halve it.
    """

    def __init__(self):
        self.pause, self.resumed = 0.0, 0.0

    def on_execution_step(self, executor):
        busy_waiting = time.perf_counter() - self.resumed < 0.01
        self.pause = min(0.05, 2 * self.pause + 0.001) if busy_waiting else self.pause / 2
        time.sleep(self.pause)
        self.resumed = time.perf_counter()


class BlockStatsCleaner(ExecutionCallback):
    """Every `STEPS` steps, drops what Ray Data keeps of each block that a stage made, for `Dataset.stats()`.

    That is some kilobytes a block, as long as the run lasts; a run of Stable Diffusion's size has tens of millions.
    """

    STEPS = 100  # of the scheduling loop, of which each takes a tenth of a second at most

    def __init__(self):
        self.steps = 0

    def on_execution_step(self, executor):
        self.steps += 1
        stats = executor.get_stats() if self.steps % self.STEPS == 0 else None
        while stats:
            for blocks in stats.metadata.values():
                blocks.clear()
            stats = next(iter(stats.parents), None)
