"""In: checkpoints, held-out rows, prompts. Out: losses, images and scores of each checkpoint, during training.

Read `validation` first, which Ray Train calls, then `at_checkpoints`. To copy: `scores` with `encode.models`;
`validation_loss` with `model` and `train.step`.
"""
