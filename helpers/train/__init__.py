"""In: blocks of latents, a `TrainingConfig`. Out: checkpoints, metrics, recorded failures, in `runs/{run_name}`.

Read `loop` first: the function of a Ray Train worker. `step` is one step in plain PyTorch.
To copy: `step` takes `model`, `latents` and `config` along; `loop` takes most of this folder too.
"""
