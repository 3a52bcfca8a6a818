"""In: the name of a denoiser, noisy latents, captions. Out: the denoiser, sharded and compiled, and its loss.

Read `sharding` first, then `diffusion` (noise, targets, loss). A new denoiser goes into `denoisers`.
"""
