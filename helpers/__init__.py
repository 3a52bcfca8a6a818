"""Pre-training a text-to-image diffusion model: what goes inside the Ray Data and Ray Train calls of the notebooks.

Three files to read first, each from top to bottom
    encode/encoder.py   the actor that turns images and captions into latents and embeddings
    train/loop.py       the function that each training worker runs
    model/sharding.py   the denoiser: sharding, compiling, precision

The core: what a run needs. It imports nothing of online/, production/ and lesson/.
    config.py           the notebooks' parameters, checked
    storage.py          files on a disk or an object store, by one path or URI
    distributed.py      torch's ranks: rank, world size, gathering
    cluster.py          connecting to Ray, its workers' environment
    notebook.py         a progress line; keeping the executed notebook
    raw/                images (decoding, crop, resizing), readers (Parquet, tar), inputs (files, columns, row filter)
    encode/             encoder, captions (tokenizer), models (weights), stages of the pipeline, job, prepare
    latents/            schema (columns), manifest, plan (the order of rows), read
    model/              denoisers (U-Net, transformer), diffusion (noise, loss), sharding
    train/              loop, step (optimizer, EMA), source (of the steps), checkpoint, run_folder, start, metrics
    sample.py           images from a checkpoint (sampler, guidance); the exported pipeline
    evaluate.py         the held-out loss by noise level

Beside the core
    online/             encoding while a run trains
    production/         what the core does not know of, one file a promise
        extras/         what joins the training loop: watchdog, preemption, sick devices, evaluation, scores, trackers
        readers/        other layouts of raw data: image folders, Arrow; detection of what lies there
        decode/         images that kill the process which decodes them
        data/           rows that must go; reads that a slow store keeps waiting
        checks/         what is refused before a cluster is busy
    lesson/             what only the notebooks need: the drawn data set, figures, comparisons, the planner

Data
    profiles/           the notebooks' parameters for a laptop, a GPU, a node, the full run: `papermill -f`
    clusters/           Ray's launcher on AWS, KubeRay, Slurm; the image; restarting a driver
    models/             tiny-sd, tiny-clip, and the configurations that `unet_config` names
    docs/               data, parameters, copying, blurry images, why Ray alone is or is not enough, the glossary
"""
