"""In: checkpoints, held-out rows, prompts. Out: losses, images and scores of each checkpoint, during training.

Read `at_checkpoints` first. To copy: `scores` with `encode.models`; `validation_loss` with `model` and `train.step`;
`generation` with `scores` and `sample`.
"""
