"""In: raw rows, a `TrainingConfig`. Out: the steps of a run, whose images are encoded on the way, anew in each epoch.

Read `encode` first: the stages. `index` lists the raw rows for `latents.plan`. The driver runs `prepare` before a run.
"""
