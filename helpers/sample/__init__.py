"""In: a denoiser or a checkpoint, prompts. Out: images; a diffusers pipeline on disk. Read `pipeline` first.

To copy: `pipeline` and `decoder` with `encode.encoder` and `model`; `from_checkpoint` also with `train.checkpoint`.
"""
