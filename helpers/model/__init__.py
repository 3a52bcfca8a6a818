"""In: the name of a denoiser, noisy latents, captions. Out: the denoiser, sharded and compiled, and its loss.

Read `sharding` first, then `diffusion` (the objective). To copy: the folder, `distributed`, the presets in `models/`.
"""
