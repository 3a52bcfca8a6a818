"""The parameters of a training run. No Ray, no torch."""

from typing import Annotated, Any, Literal

from packaging.licenses import canonicalize_license_expression
from pydantic import AfterValidator, BeforeValidator, Field

from .. import storage
from .parameters import (
    LATENTS_URI,
    Amount,
    Count,
    CountOrZero,
    Location,
    Model,
    OptionalCount,
    OptionalText,
    Parameters,
    Positive,
    Several,
    Share,
    Shares,
    Switch,
    Text,
    Workers,
    checked,
    fixes_run,
    free,
    least_and_most,
    must_be,
)


def read_size(key: Any) -> Any:
    """JSON has text keys: "64" -> 64."""
    return int(key) if isinstance(key, str) and key.isdigit() else key


def resolve_run(run: str) -> str:
    """A run's folder as an absolute path or URI; a run's name stays as it is."""
    return storage.resolve(run) if "/" in run else run


Mixture = Annotated[Text | Shares[Text], must_be("a folder, a URI, or a mapping of several to proportions above 0")]
Size = Annotated[Count, BeforeValidator(read_size)]
SizeShares = Annotated[
    Count | Shares[Size], must_be("a size in pixels, or a mapping of sizes to shares, such as {256: 0.25, 512: 0.75}")
]
# Ray Train takes ASCII alone: from "!" to "~", here without slashes, and not of dots alone.
PLAIN = r"^\.*[!-\-0-\[\]-~][!-.0-\[\]-~]*$"
RunName = Annotated[Text, must_be("a plain ASCII folder name without slashes or spaces", pattern=PLAIN)]
Weights = Annotated[
    Annotated[Model, Field(min_length=1)] | None,
    must_be("a run, the folder or hub id of a checkpoint, pipeline or denoiser, or None"),
]
Run = Annotated[
    Annotated[Text, Field(min_length=1), AfterValidator(resolve_run)] | None,
    must_be("a run's name or folder, perhaps with @step, or None"),
]
CaptionShares = Annotated[Several[Positive] | None, must_be("a list of numbers above 0 that add up to 1, or None")]
Gamma = Annotated[Positive | Literal["auto"] | None, must_be("a number of more than 0, None for no weights, or 'auto'")]
Tracker = Literal["tensorboard", "wandb"]
Trackers = Annotated[Several[Tracker], must_be("a list of 'tensorboard' and 'wandb', or []")]
Prompts = Annotated[Text | Several[Text] | None, must_be("texts, a file, or None")]
Guidance = Annotated[float, must_be("a number of at least 1 (no guidance)", ge=1)]
Steps = Annotated[int, must_be("a whole number from 1 to 1000", ge=1, le=1000)]
Spdx = Annotated[Text, AfterValidator(canonicalize_license_expression)]
Licence = Annotated[Spdx | None, must_be("an SPDX id such as 'Apache-2.0' or 'LicenseRef-Name', or None")]
Clip = Annotated[Model | None, must_be("a CLIP's folder or hub id, or None")]
Objective = Literal["v_prediction", "epsilon", "flow"]
Which = Literal["model", "ema"]
Timesteps = Literal["auto", "uniform", "importance", "logit_normal"]
Schedule = Literal["cosine", "constant"]
Strategy = Literal["ddp", "fsdp", "fsdp-full", "hsdp"]
Precision = Literal["fp32", "bf16"]
AttentionKernel = Literal["auto", "cudnn", "flash", "efficient"]
Sampler = Literal["auto", "ddim", "dpm++", "euler", "unipc"]
Loss = Literal["validation_loss", "unweighted", "validation_set_loss", "validation_set_unweighted"]
Score = Literal[Loss, "clip_score", "cmmd", "agreement"]


@checked
class TrainingConfig(Parameters):
    """Latents -> a trained denoiser. `loop.train_loop_per_worker` takes it as it is."""

    # the data and the run
    latents_uri: Mixture = free("", LATENTS_URI)
    run_name: RunName = fixes_run("run", "name of the run, kept in storage/runs; an existing run is resumed")
    init_from: Weights = fixes_run(None, "first weights: of a run, checkpoint, pipeline, denoiser; None: random")
    init_weights: Which = fixes_run("model", 'weights of a run in init_from: "model" (the last), "ema" (averaged)')
    init_other_objective: Switch = free(False, "whether init_from may be of another prediction_type")
    continue_from: Run = fixes_run(None, 'run to continue with its optimizer, EMA, place: "name", "name@step"; None')
    # the model and its objective
    unet_config: Model = fixes_run("tiny", '"small", "sd2-base", "tiny-transformer", "transformer-600m", a config.json')
    resolution: SizeShares = fixes_run(64, "pixels, of those encoded; or several with shares of steps: {32: 1, 64: 3}")
    prediction_type: Objective = fixes_run("v_prediction", 'training target: "v_prediction", "epsilon" (noise), "flow"')
    zero_terminal_snr: Switch = fixes_run(False, 'whether the last timestep is noise alone; needs "v_prediction"')
    caption_shares: CaptionShares = fixes_run(None, "shares of a row's captions, in their order; None: equal shares")
    caption_dropout: Share = fixes_run(0.1, "share of captions replaced by the empty one, for classifier-free guidance")
    # "auto" stands for the value in `follow_objective`, which the run's config.json holds in its place.
    min_snr_gamma: Gamma = fixes_run("auto", 'gamma of the min-SNR loss weights; None: weight 1; "auto": 5, flow None')
    timestep_sampling: Timesteps = fixes_run(
        "auto", '"importance", "uniform", "logit_normal" (flow); "auto": by objective'
    )
    timestep_shift: Positive = fixes_run(1.0, "flow's shift to noise at the largest resolution; smaller ones get less")
    ema_start: CountOrZero = fixes_run(0, "first step whose weights are averaged")
    ema_decay: Share = fixes_run(0.995, "decay of the averaged weights (EMA); 0.9999 for runs of 100,000 steps")
    # the recipe
    global_batch_size: Count = fixes_run(64, "rows of one optimizer step, over all workers")
    micro_batch_size: OptionalCount = free(None, "rows of one forward pass; None: a whole unit")
    units_per_step: OptionalCount = fixes_run(None, "units per global batch; None: the maximum number of workers")
    max_steps: Count = fixes_run(1000, "optimizer steps")
    learning_rate: Positive = fixes_run(3e-3, "peak learning rate of AdamW")
    warmup_steps: CountOrZero = fixes_run(60, "steps over which the learning rate rises to its peak")
    lr_schedule: Schedule = fixes_run("cosine", 'learning rate after warm-up: "cosine" (to 0 at max_steps), "constant"')
    adam_beta2: Share = fixes_run(0.99, "AdamW's second decay rate; 0.999 for runs of 100,000 steps")
    weight_decay: Amount = fixes_run(0.01, "weight decay of AdamW")
    seed: CountOrZero = fixes_run(0, "seed of weights, data order, noise and timesteps")
    # the machines
    num_training_workers: Workers = free(1, "training processes, a GPU each with use_gpu; (least, most): elastic")
    use_gpu: Switch = free(False, "whether to train and generate images on GPUs")
    training_accelerator_type: OptionalText = free(None, 'kind of the trainers\' GPUs, such as "A100"; None: any')
    strategy: Strategy = free("ddp", 'data parallelism: "ddp"; sharded: "fsdp", "fsdp-full", "hsdp"')
    compile_unet: Switch = free(False, "torch.compile of the denoiser's blocks")
    precision: Precision = fixes_run("fp32", 'precision of matrix products: "fp32", "bf16"; with fsdp of norms too')
    cudnn_benchmark: Switch = free(False, "whether cuDNN times its convolutions for each shape, to keep the fastest")
    attention: AttentionKernel = free("auto", 'attention kernel on a GPU: "auto", "cudnn", "flash", "efficient"')
    deterministic: Switch = free(False, "same bits in every run on GPUs of one kind; slow")
    activation_checkpointing: Switch = free(False, "activations computed again in the backward pass, to save memory")
    # safety
    checkpoint_every: Count = free(250, "steps between checkpoints")
    checkpoints_kept: Count = free(2, "number of newest checkpoints kept; the best one (best_by) is kept as well")
    validate_every: CountOrZero = free(500, "steps between validations, a multiple of checkpoint_every; 0: never")
    max_skipped_steps: CountOrZero = free(0, "successive steps that may be skipped for a loss that is not finite")
    hang_timeout: Positive = free(600, "seconds without a step after which a worker is replaced")
    trackers: Trackers = free((), '"tensorboard"; "wandb" if it is installed')
    # the evaluation at checkpoints
    validation_uri: Location = free("", 'second validation set, encoded (best_by "validation_set_loss"); empty: none')
    prompts: Prompts = free(None, "texts, or a file, for images at checkpoints; None: captions of held-out rows")
    guidance_scale: Guidance = free(2.0, "scale of classifier-free guidance; 1: none")
    sampling_steps: Steps = free(20, "denoising steps per image")
    sampler: Sampler = free("auto", '"ddim"; in fewer steps "dpm++", "euler", "unipc"; "auto": "ddim", flow "dpm++"')
    clip_model: Clip = free("tiny-clip", 'CLIP for scores: "tiny-clip" (in helpers), folder or hub id; None: none')
    best_by: Score = free("validation_loss", 'score of the best checkpoint; "clip_score", "cmmd", "agreement"')
    licence: Licence = free(None, "SPDX id of the exported model's licence, for its card; None: none is named")
    profile_step: OptionalCount = free(None, "step that is profiled for the share of communication; None: none")

    def __post_init__(self) -> None:
        if self.caption_shares and abs(sum(self.caption_shares) - 1) > 1e-6:
            raise ValueError(
                f"caption_shares={list(self.caption_shares)} add up to {sum(self.caption_shares):g}: give shares of 1."
            )
        if self.init_from and self.continue_from:
            raise ValueError(
                f"init_from={self.init_from!r} and continue_from={self.continue_from!r} exclude each other: give one."
            )
        given = self.units_per_step
        self.set_derived(latents_uri=self.resolve_latents(), units_per_step=given or self.most_workers)
        self.follow_objective()
        if self.most_workers > self.units_per_step:
            raise ValueError(
                f"num_training_workers={self.num_training_workers} is more than units_per_step={self.units_per_step}, "
                "and a worker without a unit only waits: use fewer workers, or more units in a new run."
            )
        if self.global_batch_size % self.units_per_step:
            default = "" if given else " (where none is given: the most workers, or the number that the run began with)"
            raise ValueError(
                f"global_batch_size={self.global_batch_size} does not divide into units_per_step={self.units_per_step} "
                f"equal units{default}: change one of the two."
            )
        if self.micro_batch_size and self.unit_rows % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size} does not divide a unit of {self.unit_rows} rows "
                "(global_batch_size / units_per_step): change one of the three."
            )
        if self.validate_every % self.checkpoint_every:
            raise ValueError(
                f"validate_every={self.validate_every} must be a multiple of checkpoint_every={self.checkpoint_every}: "
                "validation runs on checkpoints, beside the training (0: never)."
            )
        self.check_objective()
        defaults = {"compile_unet": False, "cudnn_benchmark": False, "attention": "auto"}
        chosen = [f"{name}={getattr(self, name)!r}" for name in defaults if getattr(self, name) != defaults[name]]
        if self.deterministic and chosen:
            raise ValueError(f"deterministic=True excludes {', '.join(chosen)}, by which sums vary: leave either out.")
        if self.best_by in ("clip_score", "cmmd") and self.clip_model is None:
            raise ValueError(f"best_by={self.best_by!r} needs a CLIP: give clip_model, or keep the best by another.")
        if self.best_by.startswith("validation_set") and not self.validation_uri:
            raise ValueError(f"best_by={self.best_by!r} needs a validation_uri: give one, or keep the best by another.")

    def follow_objective(self) -> None:
        """Replace each "auto" by what goes with the objective."""
        flow = self.prediction_type == "flow"
        gamma = None if flow or self.zero_terminal_snr else 5.0
        gamma = gamma if self.min_snr_gamma == "auto" else self.min_snr_gamma
        sampling = "logit_normal" if flow else "importance" if gamma else "uniform"
        chosen = {"min_snr_gamma": gamma, "timestep_sampling": sampling, "sampler": "dpm++" if flow else "ddim"}
        self.set_derived(**{name: value for name, value in chosen.items() if getattr(self, name) == "auto"})

    def check_objective(self) -> None:
        """Raises ValueError that names all parameters of the objective that do not go together."""
        flow, kind = self.prediction_type == "flow", f"prediction_type={self.prediction_type!r}"
        gamma, problems = f"min_snr_gamma={self.min_snr_gamma}", []
        if flow and self.min_snr_gamma is not None:
            problems.append(f"{gamma} weights epsilon and v, not {kind}: set it to None.")
        if flow and self.timestep_sampling == "importance":
            problems.append(f"timestep_sampling='importance' goes by min-SNR weights, which {kind} does not have.")
        if not flow and (self.timestep_sampling == "logit_normal" or self.timestep_shift != 1):
            problems.append(f"timestep_sampling='logit_normal' and timestep_shift are for flow, not for {kind}.")
        if self.zero_terminal_snr and self.prediction_type != "v_prediction":
            problems.append(f"zero_terminal_snr=True needs v_prediction: {kind} says nothing where all is noise.")
        elif self.zero_terminal_snr and self.min_snr_gamma is not None:
            problems.append(
                f"{gamma} with zero_terminal_snr=True gives the last timestep weight 0, and sampling begins there: set "
                "min_snr_gamma to None, or zero_terminal_snr to False."
            )
        if flow and self.sampler not in ("dpm++", "unipc"):
            problems.append(f"sampler={self.sampler!r} cannot sample {kind}: choose 'dpm++' or 'unipc'.")
        fewest, most = self.sampling_steps_taken
        if not fewest <= self.sampling_steps <= most:
            problems.append(
                f"sampling_steps={self.sampling_steps}: sampler={self.sampler!r} takes {fewest} to {most} with "
                f"timestep_shift={self.timestep_shift:g}, or it does not begin once at the noisiest timestep."
            )
        if problems:
            raise ValueError(" ".join(problems))

    @property
    def sampling_steps_taken(self) -> tuple[int, int]:
        """The least and the most steps with which diffusers' sampler begins at the noisiest timestep, once.

        A shift moves flow's first timesteps together. Euler's sampler takes a single step at timestep 0.
        """
        most = int(998 / max(1, self.timestep_shift)) if self.prediction_type == "flow" else 999
        return (2 if self.sampler == "euler" else 1), most

    def resolve_latents(self) -> str | dict[str, float]:
        """`latents_uri` with absolute paths; the proportions of a mixture add up to 1."""
        if isinstance(self.latents_uri, str):
            return storage.resolve(self.latents_uri or storage.join(self.storage, "latents"))
        shares = {storage.resolve(uri): share for uri, share in self.latents_uri.items()}
        if len(shares) < len(self.latents_uri):
            raise ValueError(f"latents_uri={self.latents_uri!r} names the same folder twice: give each once.")
        total = sum(shares.values())
        uri, least = min(shares.items(), key=lambda item: item[1])
        if least / total < 1e-3:
            raise ValueError(f"latents_uri: the proportion {least!r} of {uri} is less than a thousandth: leave it out.")
        # Not divided again when a resolved mapping comes back from `config.json`: rounding would change it.
        return shares if abs(total - 1) < 1e-9 else {uri: share / total for uri, share in shares.items()}

    @property
    def proportions(self) -> dict[str, float]:
        """{URI of a latents folder: its share of every batch}, also where there is only one."""
        return self.latents_uri if isinstance(self.latents_uri, dict) else {self.latents_uri: 1.0}

    @property
    def worker_counts(self) -> range:
        """All numbers of workers that the run may have, rising."""
        fewest, most = least_and_most(self.num_training_workers)
        return range(fewest, most + 1)

    @property
    def most_workers(self) -> int:
        return self.worker_counts[-1]

    @property
    def resolutions(self) -> list[int]:
        """Every size that is trained at, rising."""
        return sorted(self.resolution) if isinstance(self.resolution, dict) else [self.resolution]

    @property
    def resolution_shares(self) -> dict[int, float]:
        """{size: its share of the steps}; they add up to 1."""
        shares = self.resolution if isinstance(self.resolution, dict) else {self.resolution: 1.0}
        return {size: share / sum(shares.values()) for size, share in shares.items()}

    @property
    def largest_resolution(self) -> int:
        """What is validated and sampled at."""
        return self.resolutions[-1]

    @property
    def unit_rows(self) -> int:
        """Rows of a unit, the smallest part of a global batch that one worker gets."""
        return self.global_batch_size // self.units_per_step

    def validates_at(self, step: int) -> bool:
        """Whether the checkpoint of a step is due for validation: every `validate_every` steps, and the last one."""
        return self.validate_every > 0 and (step % self.validate_every == 0 or step == self.max_steps)

    @property
    def run_uri(self) -> str:
        return storage.join(self.storage, "runs", self.run_name)
