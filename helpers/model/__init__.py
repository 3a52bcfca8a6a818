"""In: the name of a denoiser, noisy latents, captions. Out: the denoiser, sharded and compiled, and its loss.

Read `sharding` first, then `diffusion` (the objective). To reuse this folder elsewhere, copy it with `distributed` and
the presets in `models/`.
"""
