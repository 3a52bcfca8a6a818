"""In: a source of steps, a `TrainingConfig`. Out: checkpoints, metrics, recorded failures, in `runs/{run_name}`.

Read `loop` first: the function of a Ray Train worker. `step` is one step in plain PyTorch. `checkpoint` saves and
uploads, `run_folder` finds what is saved. `start` is what the driver does before a run.
"""
