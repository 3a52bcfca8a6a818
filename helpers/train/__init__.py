"""In: blocks of latents, a `TrainingConfig`. Out: checkpoints, metrics, failures noted, in `runs/{run_name}`.

Read `loop` first: the function of a Ray Train worker; `step` is one step in plain PyTorch.
To copy: `step` with `model`; `loop` takes `latents` and most of this folder along.
"""
