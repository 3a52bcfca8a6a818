"""Pre-training a text-to-image diffusion model: what goes inside the Ray Data and Ray Train calls of the notebooks.

Six modules hold the system, marked with *: read them first. In reading order; imports only point up in this list.

Core
    storage         files on a disk or an object store, by one path or URI
    config          the notebooks' parameters, checked when they are built
    schema          the layout of latents on disk: columns, their shapes and codecs, the manifest
    images          encoded bytes to square RGB pictures; captions to token ids
  * encoder         the actor that turns pictures and captions into latents and embeddings
  * preprocess      what the preprocessing pipeline maps over rows: transform, write
    resumable_job   the commit protocol of a preprocessing job
  * ingest          the epoch plan: which rows make which step, on any number of workers
    online          the epoch plan over raw pictures, which are encoded on the way to the trainers
    diffusion       the objective: noise, v-prediction, min-SNR weights, EMA
  * unet            the U-Net, sharded and compiled
    distributed     rank, world size, gathering
    train_step      one training step in plain PyTorch
    checkpoint      saving, loading and finding complete checkpoints
  * train           the training function of a Ray Train worker
    run_setup       checks before a run starts
  * evaluate        pictures from prompts, validation, the exported diffusers pipeline
data_io/            readers of Parquet, WebDataset tars and image folders; `row_filter`
runtime/            connecting to Ray, metrics, profiling, progress, faults
lesson/             figures, published numbers, the drawn data set, the builder of tiny-sd
"""
