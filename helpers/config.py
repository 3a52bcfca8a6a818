"""The notebooks' parameters as frozen dataclasses, checked when they are built. No Ray, no torch.

Field names are the parameter names. A wrong value raises ValueError in one sentence that names it and what to change,
before anything is started.
"""

import dataclasses
import itertools
import json
import math
import os

from . import storage


def choice(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, choices))}.")


def check_sections(sections, known):
    """Raises ValueError if `sections` names one that the notebook does not have."""
    if not isinstance(sections, (list, tuple)):
        raise ValueError(
            f"sections={sections!r} must be a list, of {', '.join(map(repr, known))}; []: the main lesson alone."
        )
    for section in sections:
        choice("sections", section, known)


def is_number(value):
    """Papermill passes what it cannot read as a number as text; "nan" it can read."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def positive(config, *names):
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")


def share(config, *names):
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or not 0 <= value < 1:
            raise ValueError(f"{name}={value!r} must be a share: at least 0, less than 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """What all notebooks share; `from_parameters(globals())` takes a notebook's variables of the same names."""

    storage: str = "storage"

    @classmethod
    def from_parameters(cls, namespace):
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: namespace[name] for name in names if name in namespace})

    def check_types(self):
        """Texts and switches; numbers are checked with their ranges."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is str and not isinstance(value, (str, os.PathLike)):
                raise ValueError(f"{field.name}={value!r} must be a text.")
            if (
                field.type == str | None
                and value is not None
                and not (isinstance(value, (str, os.PathLike)) and str(value))
            ):
                raise ValueError(f"{field.name}={value!r} must be a text, or None.")
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r} must be True or False.")

    def to_dict(self):
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values):
        return cls(**values)

    def resolve(self, **values):
        """Set derived values on a frozen instance; only for `__post_init__`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessingConfig(Parameters):
    """Raw images and captions -> latents."""

    encoder_model: str = "tiny-sd"
    encoder_precision: str = "fp32"
    input_uri: str = ""
    input_format: str = "parquet"
    row_filter: str = ""
    image_column: str = "jpg"
    caption_column: str = "caption"
    id_column: str = "hash"
    limit: int | None = None
    resolutions: tuple = (32, 64)
    upscale: bool = False
    max_aspect_ratio: float | None = None
    max_pixels: int = 89_478_485  # Pillow's own limit against decompression bombs
    latents: str = "moments"
    text_precision: str = "fp16"
    latents_uri: str = ""
    num_transform_workers: int = 1
    num_encoders: int = 1
    gpus_per_encoder: float = 0
    encoder_accelerator_type: str | None = None
    encoder_batch_size: int = 32
    dollars_per_hour: float = 0.0

    def __post_init__(self):
        self.check_types()
        choice("encoder_precision", self.encoder_precision, ("fp32", "fp16", "bf16"))
        choice("latents", self.latents, ("moments", "mean"))
        choice("text_precision", self.text_precision, ("fp16", "fp8"))
        choice("input_format", self.input_format, ("parquet", "webdataset", "imagefolder"))
        positive(self, "num_transform_workers", "num_encoders", "encoder_batch_size", "max_pixels")
        if not is_number(self.dollars_per_hour) or self.dollars_per_hour < 0:
            raise ValueError(f"dollars_per_hour={self.dollars_per_hour!r} must be a number of at least 0.")
        if self.max_aspect_ratio is not None and not (is_number(self.max_aspect_ratio) and self.max_aspect_ratio >= 1):
            raise ValueError(
                f"max_aspect_ratio={self.max_aspect_ratio!r} must be a number of at least 1 (longer side / shorter), or None."
            )
        if self.limit is not None:
            positive(self, "limit")
        if not is_number(self.gpus_per_encoder) or self.gpus_per_encoder < 0:
            raise ValueError(f"gpus_per_encoder={self.gpus_per_encoder!r} must be 0 (CPU), a share of a GPU, or more.")
        if not isinstance(self.resolutions, (list, tuple)):
            raise ValueError(f"resolutions={self.resolutions!r} must be a list of sizes, such as [64].")
        if not self.resolutions:
            raise ValueError("resolutions=[] names no size to encode: give at least one, such as [64].")
        for resolution in self.resolutions:
            if not isinstance(resolution, int) or isinstance(resolution, bool) or resolution < 8:
                raise ValueError(
                    f"resolutions={list(self.resolutions)!r}: {resolution!r} is no size of 8 pixels or more."
                )
        self.resolve(
            storage=storage.resolve(self.storage),
            resolutions=tuple(sorted(set(self.resolutions))),
            encoder_model=storage.resolve_folder(self.encoder_model),
            input_uri=storage.resolve(self.input_uri) if self.input_uri else "",
            latents_uri=storage.resolve(self.latents_uri or storage.join(self.storage, "latents")),
        )

    @property
    def raw_uri(self):
        """Where the drawn sample data is kept when no `input_uri` is given."""
        return storage.join(self.storage, "raw")

    @property
    def data_uri(self):
        """Where the raw rows are: `input_uri`, or the drawn sample data."""
        return self.input_uri or self.raw_uri


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineConfig(PreprocessingConfig):
    """Raw images and captions that are encoded on the way to the trainers, cut and mirrored anew in each epoch."""

    random_crop: float = 1.0
    horizontal_flip: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not is_number(self.random_crop) or not 0 < self.random_crop <= 1:
            raise ValueError(
                f"random_crop={self.random_crop!r} must be a share of the picture's shorter side: more than 0, at most 1 (the "
                "centre square)."
            )


# What may change when a run is resumed; everything else decides what is learned.
MAY_CHANGE = {
    "storage",
    "latents_uri",
    "num_training_workers",
    "use_gpu",
    "training_accelerator_type",
    "micro_batch_size",
    "strategy",
    "compile_unet",
    "channels_last",
    "activation_checkpointing",
    "checkpoint_every",
    "checkpoints_kept",
    "validate_every",
    "max_failures",
    "hang_timeout",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Parameters):
    """Latents -> a trained U-Net. `train_loop_config` is `to_dict()` of this."""

    latents_uri: str | dict = ""
    run_name: str = "run"
    init_from: str | None = None
    # the model and its objective
    unet_config: str = "tiny"
    resolution: int | dict = 64
    prediction_type: str = "v_prediction"
    caption_dropout: float = 0.1
    min_snr_gamma: float | None = 5.0
    ema_start: int = 0
    ema_decay: float = 0.995
    # the recipe
    global_batch_size: int = 64
    micro_batch_size: int | None = None
    units_per_step: int = 1
    max_steps: int = 1000
    learning_rate: float = 3e-3
    warmup_steps: int = 60
    lr_schedule: str = "cosine"
    adam_beta2: float = 0.99
    weight_decay: float = 0.01
    seed: int = 0
    # the machines
    num_training_workers: int | tuple = 1
    use_gpu: bool = False
    training_accelerator_type: str | None = None
    strategy: str = "ddp"
    compile_unet: bool = False
    precision: str = "fp32"
    channels_last: bool = False
    activation_checkpointing: bool = False
    # safety
    checkpoint_every: int = 250
    checkpoints_kept: int = 2
    validate_every: int = 500
    validation_share: float = 0.02
    max_failures: int = 3
    hang_timeout: float = 600

    def __post_init__(self):
        self.check_types()
        choice("prediction_type", self.prediction_type, ("v_prediction", "epsilon"))
        choice("strategy", self.strategy, ("ddp", "fsdp", "fsdp-full", "hsdp"))
        choice("precision", self.precision, ("fp32", "bf16"))
        choice("lr_schedule", self.lr_schedule, ("cosine", "constant"))
        positive(
            self,
            "global_batch_size",
            "units_per_step",
            "max_steps",
            "checkpoint_every",
            "checkpoints_kept",
        )
        share(self, "caption_dropout", "validation_share", "ema_decay", "adam_beta2")
        for name in ("warmup_steps", "ema_start", "validate_every", "max_failures", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 0.")
        if not is_number(self.weight_decay) or self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay!r} must be a number of at least 0.")
        if not is_number(self.learning_rate) or self.learning_rate <= 0:
            raise ValueError(f"learning_rate={self.learning_rate!r} must be more than 0.")
        if self.min_snr_gamma is not None and not (is_number(self.min_snr_gamma) and self.min_snr_gamma > 0):
            raise ValueError(f"min_snr_gamma={self.min_snr_gamma!r} must be more than 0, or None for no weighting.")
        if self.run_name in ("", ".", "..") or set(self.run_name) & set("/\\ "):
            raise ValueError(f"run_name={self.run_name!r} must be a plain folder name without slashes or spaces.")
        if not is_number(self.hang_timeout) or self.hang_timeout <= 0:
            raise ValueError(f"hang_timeout={self.hang_timeout!r} must be a number of seconds of more than 0.")
        self.check_workers()
        self.check_batch()
        self.check_resolution()
        if self.validate_every % self.checkpoint_every:
            raise ValueError(
                f"validate_every={self.validate_every} must be a multiple of checkpoint_every={self.checkpoint_every}: "
                "validation runs on checkpoints, beside the training (0: never)."
            )
        self.resolve(
            storage=storage.resolve(self.storage),
            latents_uri=self.resolve_latents(),
            unet_config=storage.resolve_folder(self.unet_config),
            init_from=self.init_from and storage.resolve_folder(self.init_from),
        )

    def check_workers(self):
        """A number of workers, or a pair (least, most); papermill gives a pair as a list."""
        found = self.num_training_workers
        pair = list(found) if isinstance(found, (list, tuple)) else [found, found]
        if (
            len(pair) != 2
            or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in pair)
            or pair[0] > pair[1]
        ):
            raise ValueError(
                f"num_training_workers={found!r} must be a whole number of at least 1, or a pair (least, most) of them."
            )
        if isinstance(found, (list, tuple)):
            self.resolve(num_training_workers=tuple(pair))

    @property
    def fewest_workers(self):
        return (
            self.num_training_workers[0] if isinstance(self.num_training_workers, tuple) else self.num_training_workers
        )

    @property
    def most_workers(self):
        return (
            self.num_training_workers[1] if isinstance(self.num_training_workers, tuple) else self.num_training_workers
        )

    def check_resolution(self):
        """One size, or a mapping of several to the shares of steps that use them; `config.json` has the sizes as texts."""
        if not isinstance(self.resolution, dict):
            return positive(self, "resolution")
        shares = {
            int(size) if isinstance(size, str) and size.isdigit() else size: share
            for size, share in self.resolution.items()
        }
        for size, share in shares.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(
                    f"resolution: {size!r} is no size in pixels; give a mapping such as {{256: 0.25, 512: 0.75}}."
                )
            if not is_number(share) or share <= 0:
                raise ValueError(f"resolution: the share {share!r} of size {size} must be a number of more than 0.")
        if not shares:
            raise ValueError(
                "resolution={} names no size: give one, such as 64, or several with their shares of the steps."
            )
        self.resolve(resolution=shares)

    @property
    def resolutions(self):
        """Every size that is trained at, rising."""
        return sorted(self.resolution) if isinstance(self.resolution, dict) else [self.resolution]

    @property
    def largest_resolution(self):
        """What is validated and sampled at."""
        return self.resolutions[-1]

    def resolution_at(self, step):
        """The size of all pictures of step `step` (from 0): the same on every worker and after every resume.

        Multiples of the golden ratio fall evenly over the sizes' shares, so these hold in every window of some steps.
        """
        if not isinstance(self.resolution, dict):
            return self.resolution
        shares = [self.resolution[size] for size in self.resolutions]
        point = (step * 0.6180339887498949) % 1.0 * sum(shares)
        return next(
            size for size, end in zip(self.resolutions, itertools.accumulate(shares), strict=True) if point < end
        )

    def resolve_latents(self):
        """`latents_uri` with every path made absolute; of a mixture, a mapping to proportions that add up to 1."""
        if not isinstance(self.latents_uri, dict):
            if not isinstance(self.latents_uri, (str, os.PathLike)):
                raise ValueError(
                    f"latents_uri={self.latents_uri!r} must be a folder, a URI, or a mapping of several to shares."
                )
            return storage.resolve(self.latents_uri or storage.join(self.storage, "latents"))
        shares = {storage.resolve(uri): share for uri, share in self.latents_uri.items()}
        if not shares:
            raise ValueError("latents_uri={} names no data set: give at least one folder and its proportion.")
        if len(shares) < len(self.latents_uri):
            raise ValueError(f"latents_uri={self.latents_uri!r} names the same folder twice: give each once.")
        for uri, share in shares.items():
            if not is_number(share) or share <= 0:
                raise ValueError(f"latents_uri: the proportion {share!r} of {uri} must be a number of more than 0.")
        total = sum(shares.values())
        for uri, share in shares.items():
            if share / total < 1e-3:
                raise ValueError(
                    f"latents_uri: the proportion {share!r} of {uri} is less than a thousandth: leave it out."
                )
        # Not divided again when a resolved mapping comes back from `config.json`: rounding would change it.
        return shares if abs(total - 1) < 1e-9 else {uri: share / total for uri, share in shares.items()}

    @property
    def proportions(self):
        """{URI of a latents folder: its share of every batch}, also where there is only one."""
        return self.latents_uri if isinstance(self.latents_uri, dict) else {self.latents_uri: 1.0}

    def check_batch(self):
        if self.global_batch_size % self.units_per_step:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} does not divide into units_per_step={self.units_per_step} "
                "equal units: change one of the two."
            )
        for workers in range(self.fewest_workers, self.most_workers + 1):
            if self.units_per_step % workers:
                among = "" if self.fewest_workers == self.most_workers else f", which may come down to {workers}"
                raise ValueError(
                    f"units_per_step={self.units_per_step} does not divide among num_training_workers="
                    f"{self.num_training_workers}{among}: make it a multiple of every count of workers."
                )
        if self.micro_batch_size is not None:
            positive(self, "micro_batch_size")
            if self.unit_rows % self.micro_batch_size:
                raise ValueError(
                    f"micro_batch_size={self.micro_batch_size} does not divide a unit of {self.unit_rows} rows "
                    "(global_batch_size / units_per_step): change one of the three."
                )

    @property
    def unit_rows(self):
        """Rows of a unit: what one worker gets at a time."""
        return self.global_batch_size // self.units_per_step

    @property
    def run_uri(self):
        return storage.join(self.storage, "runs", self.run_name)

    def check_resume(self, earlier):
        """`earlier`: the parameters that the run was started with. Raises ValueError naming what disagrees."""
        now = json.loads(json.dumps(self.to_dict()))
        for name, value in earlier.items():
            if name not in MAY_CHANGE and name in now and now[name] != value:
                raise ValueError(
                    f"run_name={self.run_name!r} was started with {name}={value!r}, not {now[name]!r}: set it back to "
                    "resume the run, or give another run_name."
                )
