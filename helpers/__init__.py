"""Pre-training a text-to-image diffusion model: what goes inside the Ray Data and Ray Train calls of the notebooks.

Read the seven modules marked * first: they hold the core. The list is in reading order: a module imports only modules
above it, plus data_io/, runtime/ and evaluation/.

Core
    storage         files on a disk or an object store, by one path or URI
    parameters      how parameters are declared and checked
    preprocessing_config    those of the encoding
    training_config         those of a run
    config          both, and the notebooks' sections
    schema          the columns of latents on disk: names, shapes, bytes
    manifest        what a latents folder says about itself: counts, encoder, files with their row groups
    images          encoded bytes to RGB pictures of a given shape; captions to token ids
    hub             a model hub's ids and their commits, looked up once
  * encoder         the actor that turns pictures and captions into latents and embeddings
    decoder         latents to pictures, as many at a time as a GPU's memory holds
  * plan            which rows make which step, on any number of workers
  * read            how they get to the workers: Ray Data's tasks, blocks in order
    held_out_rows   the latents that a run is validated on
    resumable_job   the commit protocol of a preprocessing job
  * preprocess      the stages around the encoder: transform, write
    online          the epoch plan over raw pictures, encoded on the way to the trainers
    distributed     rank, world size, gathering
    denoisers       the classes that can be trained: how each is called, its blocks, its pipeline
    diffusion       the objective: noise, v-prediction, flow, min-SNR weights, EMA
  * unet            the U-Net, or another denoiser, sharded and compiled
    train_step      one training step in plain PyTorch
    validation      the loss on held-out rows
    checkpoint      saving, loading and finding complete checkpoints
  * train           the training function of a Ray Train worker
    run_setup       checks before a run starts
    kept_latents    online runs that encode in the first epoch and keep the latents for later ones
  * sampling        pictures from prompts, the exported diffusers pipeline
data_io/            raw data
    readers         Parquet, WebDataset tars, image folders
    inputs          the files and rows of a job; every format gives the same four columns
    filters         `row_filter` as a Ray Data expression
    index           which raw rows an online run uses and where they are, from metadata columns only
    checks          checks of the raw data before a job starts
runtime/            support at run time
    session         connecting to Ray, shared storage, GPUs
    lease           allows one driver at a time per job or run
    monitoring      progress of a run in a notebook and in a terminal, its failures
    metrics_log     `metrics.jsonl`, throughput
    results         evaluation results of a run's checkpoints
    tracking        a run in TensorBoard, Weights & Biases, MLflow
    meter           a step's images/s, FLOPs, MFU, memory, waiting
    profiling       where its time and FLOPs go
    drain           taking a node out of Ray: EC2's interruption notice, a sick machine
    fault_tolerance a worker that hangs, a sick machine, preemption notices, a lost checkpoint
    ray_errors      what Ray's errors mean: was something lost?
    throttle        keeps Ray Data's scheduling loop from taking a core from the trainer, and its memory small
evaluation/         is the model getting better?
    prompts         prompts from a list, a file, COCO's captions
    scores          CLIP score and CMMD, and the CLIP model behind them
    generation      pictures of many prompts through Ray Data, resumable; their scores, also by guidance scale
    at_checkpoints  losses, pictures and scores of each checkpoint, during training
    trials          settings compared seed by seed: paired differences with intervals
    side_by_side    a blind comparison of two models by a reader
    memorisation    the nearest training latents of generated pictures
    figures, drawing    plots of the above; helpers shared with the lessons' plots
lesson/             what only the notebooks need
    captioned_shapes    the drawn data set with its detector
    architecture                       draws the diagram of the pipeline
    figures, looks                     plots; rows, rejects and held-out prompts to look at
    baseline, ablations, fault_injection    a plain DataLoader, cumulative optimisations, killed workers
    published_results, estimates, full_run  published numbers (a YAML file), cluster estimates, the full run
    planner, network                        hours and dollars of a run; bandwidth and EFA
profiles/           the notebooks' parameters for a laptop, a GPU, a node, the full run: `papermill -f`
unets/              configurations that `unet_config` names
clusters/           cluster configurations: Ray's launcher on AWS, KubeRay, Slurm; the image; restarting a driver
"""
