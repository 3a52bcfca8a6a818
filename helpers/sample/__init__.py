"""In: a checkpoint or a denoiser, prompts. Out: pictures; a diffusers pipeline on disk. Read `pipeline` first.

To copy: `decoder` with `encode.encoder`; `pipeline` with `model`, `encode` and `train.checkpoint`.
"""
