"""Pre-training a text-to-image diffusion model: what goes inside the Ray Data and Ray Train calls of the notebooks.

Three files to read first, each from top to bottom
    encode/encoder.py   the actor that turns pictures and captions into latents and embeddings
    train/loop.py       the function that each training worker runs
    model/sharding.py   the denoiser: sharding, compiling, precision

The stages, in the order of a row; a stage imports only those above it, and the two files
    config/         the notebooks' parameters, checked
    runtime/        a session of Ray, leases, progress
    latents/        latents on disk: columns, manifest, the plan of a run, reading
    raw/            raw pictures and captions: formats, filters, decoding
    model/          the denoiser and its objective
    encode/         raw rows to latents, as a job or while a run trains
    train/          the training loop, its steps, checkpoints, metrics, faults
    sample/         images from a checkpoint; the exported pipeline
    evaluation/     losses, images and scores of checkpoints
    lesson/         what only the notebooks need
    storage.py      files on a disk or an object store, by one path or URI
    distributed.py  rank, world size, gathering

Data
    profiles/       the notebooks' parameters for a laptop, a GPU, a node, the full run: `papermill -f`
    clusters/       Ray's launcher on AWS, KubeRay, Slurm; the image; restarting a driver
    models/         tiny-sd, tiny-clip, and the configurations that `unet_config` names
    docs/           data, parameters, copying, blurry images, why Ray alone is or is not enough, the glossary
"""
