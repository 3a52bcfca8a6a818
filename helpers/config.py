"""The notebooks' parameters as frozen dataclasses that pydantic checks when they are built. No Ray, no torch.

Each field says its type, its default, what it is (the comment beside it in the notebooks' parameters cells) and, by the
function that makes it, what it decides. A wrong value raises ValueError before anything starts, in one sentence that
names the parameter, its value and what to change. Building a config reads no storage.
"""

import ast
import dataclasses
import difflib
import functools
import json
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from . import storage


def resolve_model(name: str) -> str:
    """The absolute path of a local file or folder; other names (a preset, a hub id) stay as they are."""
    return os.path.abspath(name) if os.sep in name and os.path.exists(name) else name


def least_and_most(workers: int | Sequence[int]) -> tuple[int, int]:
    """Of a number of workers, or of a pair of them."""
    return (workers, workers) if isinstance(workers, int) else tuple(workers)


def check_order(pair: tuple[int, int]) -> tuple[int, int]:
    if pair[0] > pair[1]:
        raise ValueError("the least number is larger than the most")
    return pair


def pool_size(num_encoders: int | Sequence[int]) -> dict[str, int]:
    """Arguments of Ray Data's `ActorPoolStrategy`; of a pair, it has as many actors as there is work and room for."""
    least, most = least_and_most(num_encoders)
    return {"min_size": least, "max_size": most}


def read_path(value: Any) -> Any:
    return str(value) if isinstance(value, os.PathLike) else value


def sort_unique(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(sorted(set(values)))


def read_size(key: Any) -> Any:
    """JSON has text keys: "64" -> 64."""
    return int(key) if isinstance(key, str) and key.isdigit() else key


# ---- types of parameters: those of several, then those of one


def must_be(text: str, **limits: Any) -> Any:
    """`limits` of a value, and the text that completes the sentence "NAME=VALUE must be ..."."""
    return Field(description=text, **limits)


T = TypeVar("T")
Several = Annotated[tuple[T, ...], Field(strict=False)]  # a list or a tuple: papermill gives lists
Sorted = Annotated[Several[T], Field(min_length=1), AfterValidator(sort_unique)]
Positive = Annotated[float, must_be("more than 0", gt=0)]
Shares = Annotated[dict[T, Positive], Field(min_length=1)]
Text = Annotated[str, must_be("a text"), BeforeValidator(read_path)]
OptionalText = Annotated[Annotated[Text, Field(min_length=1)] | None, must_be("a text, or None")]
Location = Annotated[Text, AfterValidator(lambda uri: storage.resolve(uri) if uri else "")]
Model = Annotated[Text, AfterValidator(resolve_model)]
Switch = Annotated[bool, must_be("True or False")]
Count = Annotated[int, must_be("a whole number of at least 1", ge=1)]
OptionalCount = Annotated[Count | None, must_be("a whole number of at least 1, or None")]
CountOrZero = Annotated[int, must_be("a whole number of at least 0", ge=0)]
Pair = Annotated[tuple[Count, Count], Field(strict=False), AfterValidator(check_order)]
Workers = Annotated[Count | Pair, must_be("a whole number of at least 1, or a pair (least, most) of them")]
Amount = Annotated[float, must_be("a number of at least 0", ge=0)]
Share = Annotated[float, must_be("a share: at least 0, less than 1", ge=0, lt=1)]

Sizes = Annotated[Sorted[Annotated[int, Field(ge=8)]], must_be("a list of sizes of at least 8 pixels, such as [64]")]
Ratios = Annotated[Sorted[Positive], must_be("a list of numbers of more than 0 (width / height), such as [0.5, 1, 2]")]
LargestRatio = Annotated[float | None, must_be("a number of at least 1 (longer side / shorter side), or None", ge=1)]
Crop = Annotated[float, must_be("a share of the shorter side: more than 0, at most 1 (the centre square)", gt=0, le=1)]
Gpus = Annotated[float, must_be("0 (CPU), a share of a GPU, or more", ge=0)]
Mixture = Annotated[Text | Shares[Text], must_be("a folder, a URI, or a mapping of several to proportions above 0")]
Size = Annotated[Count, BeforeValidator(read_size)]
SizeShares = Annotated[
    Count | Shares[Size], must_be("a size in pixels, or a mapping of sizes to shares, such as {256: 0.25, 512: 0.75}")
]
RunName = Annotated[Text, must_be("a plain folder name without slashes or spaces", pattern=r"^\.*[^/\\ .][^/\\ ]*$")]
Weights = Annotated[Annotated[Model, Field(min_length=1)] | None, must_be("a run, the folder of a U-Net, or None")]
Gamma = Annotated[float | None, must_be("more than 0, or None for no weighting", gt=0)]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
Trackers = Annotated[Several[Tracker], must_be("a list of 'tensorboard', 'wandb' and 'mlflow', or []")]
Prompts = Annotated[Text | Several[Text] | None, must_be("texts, a file, or None")]
Guidance = Annotated[float, must_be("a number of at least 1 (no guidance)", ge=1)]
Steps = Annotated[int, must_be("a whole number from 1 to 1000", ge=1, le=1000)]
Clip = Annotated[Model | None, must_be("a CLIP's folder or hub id, or None")]


# ---- fields: what each kind of parameter decides


def parameter(default: Any, text: str, *, decides: str | None) -> Any:
    """A field: its default, the comment that stands beside it in each notebook, and what it decides."""
    return dataclasses.field(default=default, metadata={"text": text, "decides": decides})


rows = functools.partial(parameter, decides="rows")  # which rows are used, and at which size
stored = functools.partial(parameter, decides="stored")  # what is stored of a row
learned = functools.partial(parameter, decides="learned")  # what a run learns
free = functools.partial(parameter, decides=None)  # none of these: it may change when a job or a run is resumed
LATENTS_URI = "encoded data; empty: storage/latents"


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
            raise ValueError(describe_error(cls, error.errors()[0], values)) from None

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
    return f"{name}={values[name]!r} must be {cls.__pydantic_fields__[name].description}."


def check_sections(sections: Sequence[str], known: Sequence[str]) -> None:
    """Raises ValueError if `sections` names one that the notebook does not have."""
    choices = ", ".join(map(repr, known))
    if not isinstance(sections, (list, tuple)):
        raise ValueError(f"sections={sections!r} must be a list of {choices}, or [] for the main lesson alone.")
    for section in sections:
        if section not in known:
            raise ValueError(f"sections={section!r} is unknown: choose one of {choices}.")


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


@checked
class Parameters:
    """What all notebooks share."""

    storage: Location = free("storage", "folder or URI under which everything is kept; on several nodes a shared one")
    validation_share: Share = rows(0.02, "share of the rows held out for validation, chosen by a hash of their id")
    max_failures: CountOrZero = free(3, "how often failed workers are replaced, or a failed segment is restarted")

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

    def deciding(self, *what: str) -> dict[str, Any]:
        """{name: value} of the parameters that decide `what`: "rows", "stored" or "learned"."""
        names = [field.name for field in dataclasses.fields(self) if field.metadata["decides"] in what]
        return {name: getattr(self, name) for name in names}

    def derive(self, **values: Any) -> None:
        """Set fields that follow from others; only for `__post_init__`, as the instance is frozen."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


@checked
class PreprocessingConfig(Parameters):
    """Raw images and captions -> latents."""

    # the input
    input_uri: Location = free("", "raw data: a file, a folder or a pattern, local or s3://; empty: draw sample data")
    input_format: Literal["parquet", "webdataset", "imagefolder"] = rows(
        "parquet", 'or "webdataset" (tars), "imagefolder" (pictures and a metadata file)'
    )
    row_filter: Text = rows("", "an expression on the columns; rows that fail it are left out")
    image_column: Text = stored("jpg", "an encoded picture: its bytes, or its path in the input")
    caption_column: Text = rows("caption", "its text")
    id_column: Text = rows("hash", "its id")
    limit: OptionalCount = rows(None, "rows to read at most; None: all")
    # the transform
    resolutions: Sizes = rows((32, 64), "the sizes to encode, in pixels, in one pass")
    aspect_ratios: Ratios = rows((1.0,), "width / height; [0.5, 0.75, 1, 1.33, 2]: pictures are cropped to the nearest")
    size_multiple: Count = rows(16, "pixels; sides of shapes that are not square are multiples of it; 64 for SD 2")
    upscale: Switch = rows(False, "enlarge pictures that are smaller than a resolution, where they would be left out")
    max_aspect_ratio: LargestRatio = rows(None, "longer side over shorter side at most, for example 2; None: any")
    # The default is Pillow's own limit.
    max_pixels: Count = rows(89_478_485, "of a picture; larger ones are rejected unopened (decompression bombs)")
    # The encoder. It decides what is stored too: `preprocess.describe` records it.
    encoder_model: Model = free("tiny-sd", "the one in helpers, or a folder or hub id in diffusers layout")
    encoder_revision: OptionalText = free(None, "of a hub id: a commit, a tag or a branch; None: the newest")
    encoder_precision: Literal["fp32", "fp16", "bf16"] = free("fp32", 'or "fp16", "bf16": what the encoders compute in')
    encoder_batch_size: Count = free(32, "pictures an encoder takes at a time")
    # the output
    latents: Literal["moments", "mean"] = stored("moments", 'the VAE\'s mean and std, or "mean": half the space')
    text_precision: Literal["fp16", "fp8"] = stored("fp16", 'of stored captions; "fp8": half the space')
    latents_uri: Location = free("", LATENTS_URI)
    # the machines
    num_transform_workers: Count = free(1, "parallel CPU tasks that decode and resize")
    num_encoders: Workers = free(1, "encoder actors; (least, most): as many as there is work and room for")
    gpus_per_encoder: Gpus = free(0, "GPUs of each; 0: encode on a CPU, 0.5: two share one")
    encoder_accelerator_type: OptionalText = free(None, 'for example "A10G": the kind of GPU that encoders run on')
    dollars_per_hour: Amount = free(0.0, "price of all machines of the job together, for the report")

    def __post_init__(self) -> None:
        self.derive(latents_uri=self.latents_uri or storage.join(self.storage, "latents"))
        if self.encoder_revision:
            if self.encoder_model == "tiny-sd" or os.path.exists(self.encoder_model):
                raise ValueError(
                    f"encoder_revision={self.encoder_revision!r} is that of a hub id, and encoder_model="
                    f"{self.encoder_model!r} is a folder: leave it None."
                )
            ending = f"@{self.encoder_revision}"  # the model becomes "hub/id@revision"
            self.derive(encoder_model=self.encoder_model.removesuffix(ending) + ending)
        self.check_shapes()

    def check_shapes(self) -> None:
        """Raises ValueError for a side of 0, and for a shape that belongs to two resolutions."""
        known = {}
        for resolution, shapes in self.shapes.items():
            for shape in shapes:
                if 0 not in shape and known.setdefault(shape, resolution) == resolution:
                    continue
                what = "has a side of 0" if 0 in shape else f"is one of {known[shape]} too"
                raise ValueError(
                    f"aspect_ratios={list(self.aspect_ratios)} and size_multiple={self.size_multiple} come to "
                    f"{shape[0]} x {shape[1]} pixels at resolution {resolution}, which {what}: leave that ratio out, "
                    "or use a smaller size_multiple."
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
            return tuple(int(side / self.size_multiple + 0.5) * self.size_multiple for side in sides)

        return {
            size: list(dict.fromkeys(shape(size, ratio) for ratio in self.aspect_ratios)) for size in self.resolutions
        }

    @property
    def raw_uri(self) -> str:
        """Where the drawn sample data is kept when no `input_uri` is given."""
        return storage.join(self.storage, "raw")

    @property
    def data_uri(self) -> str:
        """Where the raw rows are: `input_uri`, or the drawn sample data."""
        return self.input_uri or self.raw_uri


@checked
class OnlineConfig(PreprocessingConfig):
    """Raw images and captions that are encoded on the way to the trainers, cropped and flipped anew in each epoch.

    With `keep_latents` they are encoded in the first epoch alone, and neither cropped at random nor flipped.
    """

    width_column: OptionalText = rows(None, "its width in pixels; with both, sizes are known before it is read")
    height_column: OptionalText = rows(None, "its height")
    read_ahead_bytes: Count = free(2**31, "of large row groups that are kept, so that each is read once")
    random_crop: Crop = stored(1.0, "smallest crop, as a share of the largest square; 1: always the centre crop")
    horizontal_flip: Switch = stored(False, "mirror every second picture; not where captions say left and right")
    # `kept_latents` refuses another value when a run is resumed.
    keep_latents: Switch = free(False, "keep what the first epoch encodes, for the others; not with random crops")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [self.width_column, self.height_column]
        if None in sizes and any(sizes):
            raise ValueError(f"width_column={sizes[0]!r} and height_column={sizes[1]!r}: name both columns or neither.")
        if None in sizes and set(self.aspect_ratios) != {1.0}:
            raise ValueError(
                f"aspect_ratios={list(self.aspect_ratios)}, while encoding online, need width_column and height_column."
            )


@checked
class TrainingConfig(Parameters):
    """Latents -> a trained U-Net. `train_loop_config` is `to_dict()` of this."""

    # the data and the run
    latents_uri: Mixture = free("", LATENTS_URI)
    run_name: RunName = learned("run", "results are kept in storage/runs/run_name; an existing run is resumed")
    init_from: Weights = learned(None, "run, or folder with a U-Net in diffusers layout, to take weights from")
    # the model and its objective
    unet_config: Model = learned("tiny", '"tiny", "small", "sd2-base" (865.9 M parameters), or a config.json\'s path')
    resolution: SizeShares = learned(64, "pixels, of those encoded; or several with shares of steps, {32: 1, 64: 3}")
    prediction_type: Literal["v_prediction", "epsilon"] = learned(
        "v_prediction", 'what the U-Net predicts: "v_prediction" or "epsilon" (the noise)'
    )
    caption_dropout: Share = learned(0.1, "share of captions replaced by the empty one, for classifier-free guidance")
    min_snr_gamma: Gamma = learned(5.0, "gamma of the min-SNR loss weights; None: all timesteps have weight 1")
    timestep_sampling: Literal["uniform", "importance"] = learned(
        "uniform", '"uniform", or more of those with a large weight: "importance"'
    )
    ema_start: CountOrZero = learned(0, "step from which weights are averaged")
    ema_decay: Share = learned(0.995, "of the averaged weights (EMA); 0.9999 for runs of 100,000 steps")
    # the recipe
    global_batch_size: Count = learned(64, "rows of one optimizer step, all workers together")
    micro_batch_size: OptionalCount = free(None, "rows of one forward pass; None: a whole unit")
    units_per_step: OptionalCount = learned(None, "pieces a batch is dealt out in; None: as many as the most workers")
    max_steps: Count = learned(1000, "optimizer steps")
    learning_rate: Positive = learned(3e-3, "peak learning rate of AdamW")
    warmup_steps: CountOrZero = learned(60, "steps over which the learning rate rises to its peak")
    lr_schedule: Literal["cosine", "constant"] = learned("cosine", 'after warm-up: to 0 at max_steps; or "constant"')
    adam_beta2: Share = learned(0.99, "AdamW's second decay rate; 0.999 for runs of 100,000 steps")
    weight_decay: Amount = learned(0.01, "of AdamW")
    seed: CountOrZero = learned(0, "of weights, data order, noise and timesteps")
    # the machines
    num_training_workers: Workers = free(1, "training processes, one GPU each with use_gpu; (least, most): elastic")
    use_gpu: Switch = free(False, "train on GPUs")
    training_accelerator_type: OptionalText = free(None, 'for example "A100": the kind of GPU that trainers run on')
    strategy: Literal["ddp", "fsdp", "fsdp-full", "hsdp"] = free("ddp", 'or sharded: "fsdp", "fsdp-full", "hsdp"')
    compile_unet: Switch = free(False, "torch.compile of the U-Net's blocks")
    precision: Literal["fp32", "bf16"] = learned("fp32", 'or "bf16", for matrix products; with fsdp for norms too')
    channels_last: Switch = free(False, "memory layout (B, H, W, C), which tensor cores prefer")
    activation_checkpointing: Switch = free(False, "recompute activations in the backward pass to save memory")
    # safety
    checkpoint_every: Count = free(250, "steps between checkpoints")
    checkpoints_kept: Count = free(2, "the newest ones; the best one (best_by) is kept as well")
    validate_every: CountOrZero = free(500, "steps; a multiple of checkpoint_every; 0: never")
    max_skipped_steps: CountOrZero = free(0, "steps in a row that may be skipped because the loss is not finite")
    hang_timeout: Positive = free(600, "seconds without a step after which a worker is replaced")
    trackers: Trackers = free((), '"tensorboard"; "wandb" or "mlflow" where they are installed')
    # the evaluation at checkpoints
    prompts: Prompts = free(None, "texts, or a file of them; None: captions that training does not see")
    guidance_scale: Guidance = free(2.0, "of classifier-free guidance; 1: none")
    sampling_steps: Steps = free(20, "steps in which a picture is drawn")
    sampler: Literal["ddim", "dpm++", "euler", "unipc"] = free("ddim", 'or, in fewer steps, "dpm++", "euler", "unipc"')
    clip_model: Clip = free("tiny-clip", "CLIP for scores: the one in helpers, a folder or hub id; None: none")
    best_by: Literal["validation_loss", "unweighted", "clip_score", "cmmd", "agreement"] = free(
        "validation_loss", 'which checkpoint is kept as best: "clip_score", "cmmd", "agreement"'
    )
    profile_step: OptionalCount = free(None, "step that is profiled for the share of communication; None: none")

    def __post_init__(self) -> None:
        given = self.units_per_step
        self.derive(latents_uri=self.resolve_latents(), units_per_step=given or self.most_workers)
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
        for name, value in json.loads(json.dumps(self.deciding("rows", "stored", "learned"))).items():
            if (before := earlier.get(name, value)) != value:
                raise ValueError(
                    f"run_name={self.run_name!r} was started with {name}={before!r}, not {value!r}: set it back to "
                    "resume the run, or give another run_name."
                )
