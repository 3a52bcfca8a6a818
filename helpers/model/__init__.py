"""In: the name of a denoiser, noisy latents, captions. Out: the denoiser, sharded and compiled, and its loss.

Read `unet` first (sharding and compiling), then `diffusion` (the objective). To copy: the folder and `distributed`.
"""
