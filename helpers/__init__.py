"""Pre-training a text-to-image diffusion model: what goes inside the Ray Data and Ray Train calls of the notebooks.

Six modules hold the system, marked with *: read them first. The list is in reading order: a module imports only what
stands above it, and data_io/, runtime/ and evaluation/.

Core
    storage         files on a disk or an object store, by one path or URI
    config          the notebooks' parameters, checked when they are built
    schema          the layout of latents on disk: columns, their shapes and codecs, the manifest
    images          encoded bytes to RGB pictures of a given shape; captions to token ids
  * encoder         the actor that turns pictures and captions into latents and embeddings
  * ingest          the epoch plan: which rows make which step, on any number of workers
    resumable_job   the commit protocol of a preprocessing job
  * preprocess      what the preprocessing pipeline maps over rows: transform, write
    online          the epoch plan over raw pictures, which are encoded on the way to the trainers
    distributed     rank, world size, gathering, shards
    diffusion       the objective: noise, v-prediction, min-SNR weights, EMA
  * unet            the U-Net, sharded and compiled
    train_step      one training step in plain PyTorch
    checkpoint      saving, loading and finding complete checkpoints
  * train           the training function of a Ray Train worker
    run_setup       checks before a run starts
    kept_latents    online runs whose first epoch encodes, and whose others read what it kept
  * evaluate        pictures from prompts, validation, the exported diffusers pipeline
data_io/            raw data
    readers         Parquet, WebDataset tars, image folders
    inputs          the files and rows of a job; every format gives the same four columns
    filters         `row_filter` as a Ray Data expression
    index           which raw rows an online run uses, and where they lie, from their columns alone
    checks          checks of the raw data before a job starts
runtime/            support at run time
    session         connecting to Ray, shared storage, GPUs
    lease           one driver at a time on a job or a run
    monitoring      progress of a run in a notebook and in a terminal
    metrics_log     `metrics.jsonl`, throughput
    results         what the evaluations of a run's checkpoints found
    tracking        a run in TensorBoard, Weights & Biases, MLflow; the use of the nodes
    profiling       FLOPs, MFU, the profile of a step
    fault_tolerance hung workers, spot notices, records of failures
evaluation/         whether the model gets better
    prompts         prompts from a list, a file, COCO's captions
    scores          CLIP score, CMMD, FID, KID; CLIP and Inception, from which they are computed
    generation      pictures of many prompts through Ray Data, resumable; the sweep over guidance scales
    at_checkpoints  losses, pictures and scores of each checkpoint, while training goes on
    trials          settings compared seed by seed: paired differences with intervals
    side_by_side    a blind comparison of two models by a reader
    memorisation    the nearest training latents of generated pictures
    figures, drawing    their figures; what these share with those of the lessons
lesson/             what only the notebooks need
    captioned_shapes    the drawn data set with its detector
    build_tiny_sd, build_tiny_clip    how tiny-sd and tiny-clip were made
    figures, looks                     plots; rows, rejects and held-out prompts to look at
    baseline, ablations, fault_injection    what the lesson compares with, and breaks
    published_results, estimates, full_run  published numbers, arithmetic on clusters, how the full run differs
    planner, simulator, network             hours, dollars and machines; whole runs with faults; bandwidth and EFA
profiles/           the notebooks' parameters for a laptop, a GPU, a node, the full run: `papermill -f`
clusters/           what starts a cluster: Ray's launcher on AWS, KubeRay, Slurm; the image of its nodes
"""
