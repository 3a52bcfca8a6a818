"""In: blocks of latents, a `TrainingConfig`. Out: checkpoints, metrics, recorded failures, in `runs/{run_name}`.

Read `loop` first: the function of a Ray Train worker. `step` is one step in plain PyTorch. To reuse `step`, copy it
with `model`, `latents`, `config`, `distributed` and `storage`. `loop` also needs `runtime` and most of this folder.
"""
