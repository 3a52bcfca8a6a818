"""The notebooks' parameters as frozen dataclasses that pydantic checks when they are built. No Ray, no torch.

Field names are the parameter names. A wrong value raises ValueError before anything starts, in one sentence that names
the parameter, its value and what to change.
"""

import ast
import dataclasses
import difflib
import json
import os
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from . import storage


def resolve_model(name: str) -> str:
    """The absolute path of a local file or folder; other names (a preset, a hub id) stay as they are."""
    return os.path.abspath(name) if os.sep in name and os.path.exists(name) else name


def check_order(workers: int | tuple[int, int]) -> int | tuple[int, int]:
    if least_and_most(workers)[0] > least_and_most(workers)[1]:
        raise ValueError("the least number is larger than the most")
    return workers


def least_and_most(workers: int | Sequence[int]) -> tuple[int, int]:
    """Of a number of workers, or of a pair of them."""
    return (workers, workers) if isinstance(workers, int) else tuple(workers)


def pool_size(num_encoders: int | Sequence[int]) -> dict[str, int]:
    """Arguments of Ray Data's `ActorPoolStrategy`; of a pair, it has as many actors as there is work and room for."""
    least, most = least_and_most(num_encoders)
    return {"min_size": least, "max_size": most}


# Types of parameters. The text says what a value must be: it completes the sentence of the error.
Text = Annotated[str, "a text", BeforeValidator(lambda value: str(value) if isinstance(value, os.PathLike) else value)]
Location = Annotated[Text, AfterValidator(lambda uri: storage.resolve(uri) if uri else "")]
Model = Annotated[Text, AfterValidator(resolve_model)]
OptionalText = Annotated[Annotated[Text, Field(min_length=1)] | None, "a text, or None"]
Switch = Annotated[bool, "True or False"]
Count = Annotated[int, "a whole number of at least 1", Field(ge=1)]
CountOrZero = Annotated[int, "a whole number of at least 0", Field(ge=0)]
OptionalCount = Annotated[Count | None, "a whole number of at least 1, or None"]
Workers = Annotated[
    Count | Annotated[tuple[Count, Count], Field(strict=False)],  # papermill gives a pair as a list
    "a whole number of at least 1, or a pair (least, most) of them",
    AfterValidator(check_order),
]
Amount = Annotated[float, "a number of at least 0", Field(ge=0)]
Positive = Annotated[float, "more than 0", Field(gt=0)]
Share = Annotated[float, "a share: at least 0, less than 1", Field(ge=0, lt=1)]


def checked(cls: type) -> type:
    """Make `cls` a frozen dataclass with checked fields; pydantic's first finding becomes one plain ValueError."""
    # strict: True is no 1 and "1e-3" no number; an int may stand for a float.
    options = pydantic.ConfigDict(strict=True, extra="forbid", validate_default=True, allow_inf_nan=False)
    cls = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=options)(cls)
    validate = cls.__init__

    def __init__(self, **values: Any) -> None:
        try:
            validate(self, **values)
        except pydantic.ValidationError as error:
            sentence = describe_error(cls, error.errors()[0], values)
            raise ValueError(sentence) from None

    cls.__init__ = __init__
    return cls


def describe_error(cls: type, error: dict, values: dict) -> str:
    if not error["loc"]:  # from `__post_init__`, which checks what concerns several fields
        return str(error["ctx"]["error"])
    name = error["loc"][0]
    if error["type"] == "unexpected_keyword_argument":
        return f"{name}={values[name]!r} is not a parameter of {cls.__name__}: check its spelling."
    if error["type"] == "literal_error":
        return f"{name}={values[name]!r} is unknown: choose one of {error['ctx']['expected']}."
    annotation = typing.get_type_hints(cls, include_extras=True)[name]
    text = [item for item in annotation.__metadata__ if isinstance(item, str)][-1]
    return f"{name}={values[name]!r} must be {text}."


def check_sections(sections: Sequence[str], known: Sequence[str]) -> None:
    """Raises ValueError if `sections` names one that the notebook does not have."""
    choices = ", ".join(map(repr, known))
    if not isinstance(sections, (list, tuple)):
        raise ValueError(f"sections={sections!r} must be a list of {choices}, or [] for the main lesson alone.")
    for section in sections:
        if section not in known:
            raise ValueError(f"sections={section!r} is unknown: choose one of {choices}.")


@checked
class Parameters:
    """What all notebooks share."""

    storage: Location = "storage"

    @classmethod
    def from_parameters(cls, namespace: dict[str, Any]) -> Self:
        """The variables of a notebook (`globals()`) that have the names of parameters.

        Raises ValueError for a parameter that papermill was given and that no notebook has: papermill itself only warns
        of it, and the value would be ignored.
        """
        check_names(namespace.get("In", ()))
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: namespace[name] for name in names if name in namespace})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**values)

    def derive(self, **values: Any) -> None:
        """Set fields that follow from others; only for `__post_init__`, as the instance is frozen."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


@checked
class PreprocessingConfig(Parameters):
    """Raw images and captions -> latents."""

    # the input
    input_uri: Location = ""  # "": the sample data, which is drawn
    input_format: Literal["parquet", "webdataset", "imagefolder"] = "parquet"
    row_filter: Text = ""
    image_column: Text = "jpg"
    caption_column: Text = "caption"
    id_column: Text = "hash"
    limit: OptionalCount = None
    # the transform
    resolutions: Annotated[
        tuple[Annotated[int, Field(ge=8)], ...],
        "a list of sizes of at least 8 pixels, such as [64]",
        Field(min_length=1, strict=False),  # a list or a tuple
        AfterValidator(lambda sizes: tuple(sorted(set(sizes)))),
    ] = (32, 64)
    aspect_ratios: Annotated[
        tuple[Annotated[float, Field(gt=0)], ...],
        "a list of numbers of more than 0 (width / height), such as [0.5, 0.75, 1, 1.33, 2]",
        Field(min_length=1, strict=False),
        AfterValidator(lambda ratios: tuple(sorted(set(ratios)))),
    ] = (1.0,)
    size_multiple: Count = 16  # pixels; sides of pictures that are not square are multiples of it
    upscale: Switch = False
    max_aspect_ratio: Annotated[
        float | None, "a number of at least 1 (longer side / shorter side), or None", Field(ge=1)
    ] = None
    max_pixels: Count = 89_478_485  # Pillow's own limit against decompression bombs
    # the encoder
    encoder_model: Model = "tiny-sd"  # becomes "hub/id@revision" where a revision is given
    encoder_revision: OptionalText = None  # of a hub id: a commit, a tag or a branch
    encoder_precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    encoder_batch_size: Count = 32
    # the output
    validation_share: Share = 0.02  # of the rows, chosen by a hash of their id
    latents: Literal["moments", "mean"] = "moments"
    text_precision: Literal["fp16", "fp8"] = "fp16"
    latents_uri: Location = ""
    # the machines
    num_transform_workers: Count = 1
    num_encoders: Workers = 1
    gpus_per_encoder: Annotated[float, "0 (CPU), a share of a GPU, or more", Field(ge=0)] = 0
    encoder_accelerator_type: OptionalText = None
    dollars_per_hour: Amount = 0.0
    max_failures: CountOrZero = 3  # how often a segment is restarted after a node, an actor or a worker was lost

    def __post_init__(self) -> None:
        self.derive(latents_uri=self.latents_uri or storage.join(self.storage, "latents"))
        if self.encoder_revision:
            if self.encoder_model == "tiny-sd" or os.path.exists(self.encoder_model):
                raise ValueError(
                    f"encoder_revision={self.encoder_revision!r} is that of a hub id, and encoder_model="
                    f"{self.encoder_model!r} is a folder: leave it None."
                )
            ending = f"@{self.encoder_revision}"
            self.derive(encoder_model=self.encoder_model.removesuffix(ending) + ending)

        self.check_shapes()

    def check_shapes(self) -> None:
        """Raises ValueError for a side of 0, and for a shape that belongs to two resolutions."""
        known = {}
        for resolution, shapes in self.shapes.items():
            for width, height in shapes:
                if min(width, height) == 0 or known.setdefault((width, height), resolution) != resolution:
                    what = "has a side of 0" if min(width, height) == 0 else f"is one of {known[width, height]} too"
                    raise ValueError(
                        f"aspect_ratios={list(self.aspect_ratios)} and size_multiple={self.size_multiple} come to "
                        f"{width} x {height} pixels at resolution {resolution}, which {what}: leave that ratio out, or "
                        "use a smaller size_multiple."
                    )

    @property
    def most_encoders(self) -> int:
        return least_and_most(self.num_encoders)[1]

    @property
    def shapes(self) -> dict[int, list[tuple[int, int]]]:
        """{resolution: (width, height) of its pictures}, by rising ratio.

        The sides are the multiples of `size_multiple` nearest to the resolution times, and divided by, the root of the
        ratio; the square is the resolution's own.
        """

        def shape(resolution: int, ratio: float) -> tuple[int, int]:
            if ratio == 1:
                return resolution, resolution
            sides = resolution * ratio**0.5, resolution / ratio**0.5
            width, height = (int(side / self.size_multiple + 0.5) * self.size_multiple for side in sides)
            return width, height

        return {one: list(dict.fromkeys(shape(one, ratio) for ratio in self.aspect_ratios)) for one in self.resolutions}

    @property
    def raw_uri(self) -> str:
        """Where the drawn sample data is kept when no `input_uri` is given."""
        return storage.join(self.storage, "raw")

    @property
    def data_uri(self):
        """Where the raw rows are: `input_uri`, or the drawn sample data."""
        return self.input_uri or self.raw_uri


@checked
class OnlineConfig(PreprocessingConfig):
    """Raw images and captions that are encoded on the way to the trainers, cropped and flipped anew in each epoch.

    With `keep_latents` they are encoded in the first epoch alone, and neither cropped at random nor flipped.
    """

    width_column: OptionalText = None  # of pictures, in pixels; with both, their shapes are known before they are read
    height_column: OptionalText = None
    read_ahead_bytes: Count = 2**31  # of raw row groups that are kept, so that several chunks need one read
    random_crop: Annotated[
        float, "a share of the picture's shorter side: more than 0, at most 1 (the centre square)", Field(gt=0, le=1)
    ] = 1.0
    horizontal_flip: Switch = False
    keep_latents: Switch = False  # the first epoch's; the others read them (`kept_latents`)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [self.width_column, self.height_column]
        if None in sizes and any(sizes):
            raise ValueError(f"width_column={sizes[0]!r} and height_column={sizes[1]!r}: name both columns or neither.")
        if None in sizes and set(self.aspect_ratios) != {1.0}:
            raise ValueError(
                f"aspect_ratios={list(self.aspect_ratios)}, while encoding online, need width_column and height_column."
            )


def check_names(cells: Sequence[str]) -> None:
    """Raises ValueError if papermill set a name that is no parameter. `cells`: those run so far, IPython's `In`.

    papermill puts what it is given (`-p`, `-f`) into a cell of its own, which begins with this comment. A parameter of
    another notebook is none too many: a profile serves all three.
    """
    known = {field.name for config in (OnlineConfig, TrainingConfig) for field in dataclasses.fields(config)}
    known |= {"ray_address", "sections", "PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH"}
    for cell in cells:
        if cell.startswith("# Parameters\n"):
            for name in (statement.targets[0].id for statement in ast.parse(cell).body):
                if name not in known:
                    close = difflib.get_close_matches(name, known, 1)
                    hint = f"did you mean {close[0]}?" if close else "check its spelling."
                    raise ValueError(f"{name} is not a parameter of any notebook: {hint}")


# What may change when a run is resumed; everything else decides what is learned.
MAY_CHANGE = {"storage", "latents_uri", "checkpoint_every", "checkpoints_kept", "validate_every", "profile_step"}
MAY_CHANGE |= {"num_training_workers", "use_gpu", "training_accelerator_type", "max_failures", "hang_timeout"}
MAY_CHANGE |= {"max_skipped_steps", "trackers"}
MAY_CHANGE |= {"prompts", "guidance_scale", "sampling_steps", "sampler", "clip_model", "best_by"}
MAY_CHANGE |= {"micro_batch_size", "strategy", "compile_unet", "channels_last", "activation_checkpointing"}


def read_sizes(value: Any) -> Any:
    """JSON has text keys: {"64": 1} -> {64: 1}."""
    if not isinstance(value, dict):
        return value
    return {int(size) if isinstance(size, str) and size.isdigit() else size: share for size, share in value.items()}


@checked
class TrainingConfig(Parameters):
    """Latents -> a trained U-Net. `train_loop_config` is `to_dict()` of this."""

    # the data and the run
    latents_uri: Annotated[
        Text | Annotated[dict[Text, Positive], Field(min_length=1)],
        "a folder, a URI, or a mapping of several to their proportions of more than 0",
    ] = ""
    run_name: Annotated[
        Text, "a plain folder name without slashes or spaces", Field(pattern=r"^[^/\\ ]*[^/\\ .][^/\\ ]*$")
    ] = "run"
    init_from: Annotated[Annotated[Model, Field(min_length=1)] | None, "a run, the folder of a U-Net, or None"] = None
    # the model and its objective
    unet_config: Model = "tiny"
    resolution: Annotated[
        Count | Annotated[dict[Count, Positive], Field(min_length=1)],
        "a size in pixels, or a mapping of sizes to their shares of the steps, such as {256: 0.25, 512: 0.75}",
        BeforeValidator(read_sizes),
    ] = 64
    prediction_type: Literal["v_prediction", "epsilon"] = "v_prediction"
    caption_dropout: Share = 0.1
    min_snr_gamma: Annotated[float | None, "more than 0, or None for no weighting", Field(gt=0)] = 5.0
    timestep_sampling: Literal["uniform", "importance"] = "uniform"
    ema_start: CountOrZero = 0
    ema_decay: Share = 0.995
    # the recipe
    global_batch_size: Count = 64
    micro_batch_size: OptionalCount = None
    units_per_step: OptionalCount = None  # None: `default_units_per_step`
    max_steps: Count = 1000
    learning_rate: Positive = 3e-3
    warmup_steps: CountOrZero = 60
    lr_schedule: Literal["cosine", "constant"] = "cosine"
    adam_beta2: Share = 0.99
    weight_decay: Amount = 0.01
    seed: CountOrZero = 0
    # the machines
    num_training_workers: Workers = 1
    use_gpu: Switch = False
    training_accelerator_type: OptionalText = None
    strategy: Literal["ddp", "fsdp", "fsdp-full", "hsdp"] = "ddp"
    compile_unet: Switch = False
    precision: Literal["fp32", "bf16"] = "fp32"
    channels_last: Switch = False
    activation_checkpointing: Switch = False
    # safety
    checkpoint_every: Count = 250
    checkpoints_kept: Count = 2
    validate_every: CountOrZero = 500
    validation_share: Share = 0.02  # online; of stored latents, only 0 matters: no validation
    max_failures: CountOrZero = 3
    max_skipped_steps: CountOrZero = 0  # in a row, whose loss or gradient is not finite; one more ends the run
    hang_timeout: Annotated[float, "a number of seconds of more than 0", Field(gt=0)] = 600
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...],
        "a list of 'tensorboard', 'wandb' and 'mlflow', or []",
        Field(strict=False),
    ] = ()
    # the evaluation at checkpoints
    prompts: Annotated[Text | Annotated[tuple[Text, ...], Field(strict=False)] | None, "texts, a file, or None"] = None
    guidance_scale: Annotated[float, "a number of at least 1 (no guidance)", Field(ge=1)] = 2.0
    sampling_steps: Annotated[int, "a whole number from 1 to 1000", Field(ge=1, le=1000)] = 20
    sampler: Literal["ddim", "dpm++", "euler", "unipc"] = "ddim"
    clip_model: Annotated[Model | None, "a CLIP's folder or hub id, or None"] = "tiny-clip"
    best_by: Literal["validation_loss", "unweighted", "clip_score", "cmmd", "agreement"] = "validation_loss"
    # step whose operations are profiled, for the share of time in communication; None: none
    profile_step: OptionalCount = None

    def __post_init__(self) -> None:
        given = self.units_per_step
        self.derive(latents_uri=self.resolve_latents(), units_per_step=given or self.default_units_per_step())
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
        if self.best_by in ("clip_score", "cmmd") and self.clip_model is None:
            raise ValueError(f"best_by={self.best_by!r} needs a CLIP: give clip_model, or keep the best by another.")

    def default_units_per_step(self) -> int:
        """The most workers that the run may have; of a run that took steps, what it began with, on any workers."""
        config = storage.join(self.run_uri, "config.json")
        if storage.list_files(self.run_uri, ".jsonl") and storage.exists(config):
            return storage.read_json(config)["parameters"]["units_per_step"]
        return self.most_workers

    def resolve_latents(self) -> str | dict[str, float]:
        """`latents_uri` with absolute paths; the proportions of a mixture add up to 1."""
        if isinstance(self.latents_uri, str):
            return storage.resolve(self.latents_uri or storage.join(self.storage, "latents"))
        shares = {storage.resolve(uri): share for uri, share in self.latents_uri.items()}
        if len(shares) < len(self.latents_uri):
            raise ValueError(f"latents_uri={self.latents_uri!r} names the same folder twice: give each once.")
        total = sum(shares.values())
        for uri, share in shares.items():
            if share / total < 1e-3:
                raise ValueError(
                    f"latents_uri: the proportion {share!r} of {uri} is less than a thousandth: leave it out."
                )
        # Not divided again when a resolved mapping comes back from `config.json`: rounding would change it.
        return shares if abs(total - 1) < 1e-9 else {uri: share / total for uri, share in shares.items()}

    @property
    def proportions(self) -> dict[str, float]:
        """{URI of a latents folder: its share of every batch}, also where there is only one."""
        return self.latents_uri if isinstance(self.latents_uri, dict) else {self.latents_uri: 1.0}

    @property
    def fewest_workers(self) -> int:
        return least_and_most(self.num_training_workers)[0]

    @property
    def most_workers(self) -> int:
        return least_and_most(self.num_training_workers)[1]

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

    @property
    def run_uri(self) -> str:
        return storage.join(self.storage, "runs", self.run_name)

    def check_resume(self, earlier: dict[str, Any]) -> None:
        """`earlier`: the parameters that the run was started with. Raises ValueError naming what disagrees."""
        now = json.loads(json.dumps(self.to_dict()))
        for name, value in earlier.items():
            if name not in MAY_CHANGE and name in now and now[name] != value:
                raise ValueError(
                    f"run_name={self.run_name!r} was started with {name}={value!r}, not {now[name]!r}: set it back to "
                    "resume the run, or give another run_name."
                )
