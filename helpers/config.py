"""The notebooks' parameters: their types, defaults and checks. No Ray, no torch.

A config is a frozen dataclass, which pydantic checks when it is built. Each field says its type, its default, what it
is (the comment beside it in the notebooks' parameters cells) and, by the function that makes it, what it fixes. A wrong
value raises ValueError before anything starts, in one sentence that names the parameter, its value and what to change.
Building a config reads no storage.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from . import storage
from .storage import resolve


def as_text(value: Any) -> Any:
    """A path, or a whole number (a run called 2024), as text; other values as they are."""
    return str(value) if isinstance(value, int | os.PathLike) and not isinstance(value, bool) else value


def refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is no number")
    return value


def resolve_model(name: str) -> str:
    """The absolute path of a local file or folder, or "run@step"; other names (a preset, a hub id) stay as they are."""
    run, _, step = name.rpartition("@")
    path = run if step.isdecimal() and not os.path.exists(name) else name
    is_path = os.path.exists(path) and (os.sep in path or path.endswith(".json"))
    return os.path.abspath(name) if is_path else name


def least_and_most(workers: int | Sequence[int]) -> tuple[int, int]:
    """Of a number of workers, or of a pair of them."""
    return (workers, workers) if isinstance(workers, int) else tuple(workers)


def check_pair(pair: tuple[int, int]) -> tuple[int, int]:
    if pair[0] > pair[1]:
        raise ValueError(f"({pair[1]}, {pair[0]}): the least number comes first")
    return pair


def sort_unique(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted(set(values)))


# ---- types of parameters that both classes have

T = TypeVar("T")
Whole = Annotated[int, BeforeValidator(refuse_bool)]
Real = Annotated[float, BeforeValidator(refuse_bool)]
Count = Annotated[Whole, Field(ge=1, lt=2**63)]
CountOrZero = Annotated[Whole, Field(ge=0, lt=2**63)]
Limit = Annotated[Whole, Field(ge=-1)]
Positive = Annotated[Real, Field(gt=0)]
Amount = Annotated[Real, Field(ge=0)]
Several = tuple[T, ...]
Shares = Annotated[dict[T, Positive], Field(min_length=1)]
Text = Annotated[str, BeforeValidator(as_text)]
Name = Annotated[Text, Field(min_length=1)]
Location = Annotated[Text, AfterValidator(lambda uri: resolve(uri) if uri else "")]
Model = Annotated[Name, AfterValidator(resolve_model)]
Pair = Annotated[tuple[Count, Count], AfterValidator(check_pair)]
Share = Annotated[Real, Field(ge=0, lt=1)]
Crop = Annotated[Real, Field(gt=0, le=1)]
Extras = dict[str, dict[str, Any] | None]


# ---- fields: what a parameter fixes, which must then be the same when a job or a run is resumed


def parameter(default: Any, text: str, *, fixes: str | None) -> Any:
    """A field: its default, the comment that stands beside it in each notebook, and what it fixes."""
    value = {"default_factory": default.copy} if isinstance(default, dict) else {"default": default}
    return dataclasses.field(**value, metadata={"text": text, "fixes": fixes})


fixes_rows = functools.partial(parameter, fixes="rows")  # which rows are used, and at which size
fixes_latents = functools.partial(parameter, fixes="latents")  # what is stored of a row
fixes_run = functools.partial(parameter, fixes="run")  # what a run learns
free = functools.partial(parameter, fixes=None)  # nothing: it may change when a job or a run is resumed


def derived(default: Any, *, fixes: str) -> Any:
    """A field that follows from the models: the constructor takes it, and a notebook cannot set it."""
    return dataclasses.field(default=default, metadata={"derived": True, "fixes": fixes})


IMAGE_ENCODER = 'model whose features guide the denoiser (REPA), such as "tiny-clip"'
LATENTS_URI = "encoded data; empty: storage/latents"
PARAMETERS_PAGE = "helpers/docs/PARAMETERS.md, which lists all parameters and what replaced earlier ones"
# A text in which a profile leaves something open, such as "hub/id@REPLACE_WITH_COMMIT" or "s3://your-bucket/sd2".
PLACEHOLDER = re.compile(r"""[^'"]*(REPLACE_WITH_\w+|(?<=://)your-[\w-]+)[^'"]*""")


def checked(cls: type) -> type:
    """`cls` as a frozen dataclass with checked fields. Pydantic's first finding becomes one plain ValueError."""
    # Not strict: papermill and YAML read 1e-4 as a text, and 1e3 as no whole number.
    options = pydantic.ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)
    cls = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=options)(cls)
    validate = cls.__init__

    def __init__(self, **values: Any) -> None:
        try:
            validate(self, **values)
        except pydantic.ValidationError as error:
            raise ValueError(describe_error(error.errors(), values, cls.__pydantic_fields__)) from None

    cls.__init__ = __init__
    return cls


def names_of(cls: type) -> list[str]:
    """The names of a config's parameters: its fields but for the derived ones."""
    return [field.name for field in dataclasses.fields(cls) if "derived" not in field.metadata]


def describe_error(errors: list[dict], values: dict[str, Any], fields: dict[str, pydantic.fields.FieldInfo]) -> str:
    """One sentence for pydantic's errors about the first wrong value."""
    if not errors[0]["loc"]:  # from `__post_init__`, which checks what concerns several fields
        return str(errors[0]["ctx"]["error"])
    name = errors[0]["loc"][0]
    if errors[0]["type"] == "unexpected_keyword_argument":
        return f"{name}={values[name]!r} is not a parameter: see {PARAMETERS_PAGE}."
    reasons = describe_reasons(errors, name)
    if type(None) in typing.get_args(fields[name].annotation):
        reasons += ", or None"
    return f"{name}={values[name]!r} cannot be used: {reasons}."


def describe_reasons(errors: list[dict], name: str) -> str:
    """What pydantic says of one value; of a union, all that may be given."""
    reasons = [error["msg"].removeprefix("Value error, ") for error in errors if error["loc"][0] == name]
    text = ", or ".join(dict.fromkeys(reason[0].lower() + reason[1:] for reason in reasons))
    text = text.replace("valid string", 'valid string ("papermill -r" passes a text as it is)')
    return text.replace("valid tuple", 'valid tuple ("papermill -y" passes a list)')


def check_placeholders(given: dict[str, Any]) -> None:
    """Raises ValueError for the first text that matches `PLACEHOLDER`, also inside of lists and mappings."""
    for name, value in given.items():
        if found := PLACEHOLDER.search(repr(value)):
            raise ValueError(f"{name}: {found[0]!r} still has the placeholder {found[1]}: put your own in its place.")


@checked
class Parameters:
    """What all notebooks share."""

    storage: Location = free("storage", "folder or URI of all data and results; on several nodes a shared one")
    validation_share: Share = fixes_rows(0.02, "share of rows held out for validation, chosen by a hash of their id")
    max_failures: Limit = free(3, "restarts after lost workers, or of a failed segment; -1: no limit")
    extras: Extras = free({}, 'changes of the list of extras: {"watchdog": {"timeout": 60}, "evaluate": None}')

    @classmethod
    def from_parameters(cls, namespace: dict[str, Any], **changes: Any) -> Self:
        """The config of a notebook's variables (`globals()`) that have the names of parameters.

        A variable of another type, such as the text "1e-4", becomes what the config has. `changes`: other values.
        """
        given = {name: namespace[name] for name in names_of(cls) if name in namespace}
        check_placeholders(given)
        config = cls(**{**given, **changes})
        for name, value in given.items():
            read = getattr(config, name)
            if isinstance(value, str | int | float) and value != "auto" and type(read) is not type(value):
                namespace[name] = read
        return config

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def fixed(self, *what: str) -> dict[str, Any]:
        """{name: value} of the parameters that fix `what`: "rows", "latents" or "run"."""
        names = [field.name for field in dataclasses.fields(self) if field.metadata["fixes"] in what]
        return {name: getattr(self, name) for name in names}

    def refuse(self, problems: Iterable[str]) -> None:
        """Raises ValueError that names all problems, a sentence each."""
        if sentences := " ".join(problems):
            raise ValueError(sentences)

    def set_derived(self, **values: Any) -> None:
        """Set fields that follow from others. Only `__post_init__` may: a config does not change afterwards."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def first_difference(
    before: dict[str, Any], now: dict[str, Any], names: Iterable[str] | None = None
) -> tuple[str, Any, Any] | None:
    """`(name, value before, value now)` of the first entry in which two dicts differ; None if they are equal.

    Values are compared as JSON stores them: a tuple equals a list. An entry that one dict lacks is None there.
    `names`: the entries to compare; None: all.
    """
    before, now = json.loads(json.dumps([before, now], default=dataclasses.asdict))
    for name in before | now if names is None else names:
        if before.get(name) != now.get(name):
            return name, before.get(name), now.get(name)
    return None


def refuse_change(
    what: str, before: dict[str, Any], now: dict[str, Any], remedy: str, names: Iterable[str] | None = None
) -> None:
    """Raises ValueError with the first entry in which two dicts differ, as `first_difference` compares them.

    Args:
        what: what was begun, the subject of the sentence, such as "run_name='a'".
        remedy: what to change, the end of the sentence.
        names: the entries to compare; None: all.
    """
    if found := first_difference(before, now, names):
        name, earlier, value = found
        raise ValueError(f"{what} was begun with {name}={earlier!r}, not {value!r}: {remedy}.")


Sorted = Annotated[Several[T], Field(min_length=1), AfterValidator(sort_unique)]
Captions = str | Several[str] | None
Ratios = Sorted[Positive]
EncoderPrecision = Literal["fp32", "fp16", "bf16"]
Statistics = Literal["moments", "mean"]
InputFormat = Literal["auto", "parquet", "webdataset", "imagefolder", "arrow"]


def pool_size(num_encoders: int | Sequence[int]) -> dict[str, int]:
    """Arguments of Ray Data's `ActorPoolStrategy`. With a pair, Ray Data chooses the number of actors in between."""
    least, most = least_and_most(num_encoders)
    return {"min_size": least, "max_size": most}


@checked
class PreprocessingConfig(Parameters):
    """Raw images and captions -> latents."""

    # the input
    input_uri: Location = free("", "raw data: a file, folder or pattern, local or s3://; empty: drawn sample data")
    input_format: InputFormat = fixes_rows(
        "auto", '"auto" (what is there), "parquet", "webdataset", "imagefolder", "arrow"'
    )
    row_filter: str = fixes_rows("", "expression on the columns; rows that fail it are left out")
    image_column: Name | None = fixes_latents(None, "column of images, their bytes or paths; None: what is there")
    caption_column: Captions = fixes_rows(None, "column of captions, or several; None: caption, text or txt")
    # `prepare.prepare_job` records `num_captions` instead.
    max_captions: Count = free(1, "maximum number of captions of a row, if caption_column holds lists or lines")
    id_column: Name | None = fixes_rows(None, "column of ids; None: hash, key, __key__, id or the row number")
    limit: Count | None = fixes_rows(None, "maximum number of rows to read; None: all")
    # the transform
    resolutions: Sorted[Annotated[Whole, Field(ge=8)]] = fixes_rows(
        (32, 64), "pixels; all sizes are encoded in one pass"
    )
    aspect_ratios: Ratios = fixes_rows((1.0,), "width / height; images get the nearest: [0.5, 0.75, 1, 1.33, 2]")
    # The encoder. It fixes the latents too: `prepare.describe_encoder` records it.
    encoder_model: Model = free("tiny-sd", '"tiny-sd" (in helpers), a folder, or a hub id "name@commit"')
    vae_model: Model | None = free(None, "model with another VAE; None: encoder_model")
    text_encoder_model: Model | None = free(None, "model with another text encoder; None: encoder_model")
    image_encoder_model: Model | None = free(None, IMAGE_ENCODER)  # its features are stored beside the latents
    # Captions are encoded for it: `maximum_tokens` follows it by default.
    unet_config: Model = free("tiny", '"small", "sd2-base", "tiny-transformer", "transformer-600m", a config.json')
    maximum_tokens: Count | None = fixes_latents(None, "maximum tokens of a caption, without padding; None: padded")
    encoder_precision: EncoderPrecision = free("fp32", 'precision of the encoders: "fp32", "fp16", "bf16"')
    encoder_batch_size: Count = free(32, "images per batch of an encoder")
    # the output
    latents: Statistics = fixes_latents("moments", 'output of the VAE: "moments" (mean, std), "mean" (half the space)')
    latents_uri: Location = free("", LATENTS_URI)
    # the machines
    num_transform_workers: Count = free(1, "parallel CPU tasks that decode and resize")
    num_encoders: Count | Pair = free(1, "encoder actors; (least, most): as many as there is work and room for")
    gpus_per_encoder: Amount = free(0, "GPUs per encoder; 0: encode on CPUs; 0.5: two encoders share a GPU")
    encoder_accelerator_type: Name | None = free(None, 'kind of the encoders\' GPUs, such as "A10G"; None: any')
    # Derived by `prepare.derive`: sides of shapes other than squares are multiples of `size_multiple` pixels.
    size_multiple: Count = derived(16, fixes="rows")
    text_cleaning: Literal["none", "ftfy"] = derived("none", fixes="latents")

    def __post_init__(self) -> None:
        self.set_derived(latents_uri=self.latents_uri or storage.join(self.storage, "latents"))
        self.refuse(self.find_problems())

    def find_problems(self) -> Iterator[str]:
        """Sentences that say which parameters do not go together."""
        columns = self.caption_columns
        if len(set(columns)) < len(columns) or self.caption_column in ("", ()):
            yield f"caption_column={self.caption_column!r} must name one column, or several different ones."
        elif len(columns) > 1 and self.max_captions > 1:
            yield f"max_captions={self.max_captions} is for a single caption_column: set it to 1."
        shapes = list(itertools.chain.from_iterable(self.shapes.values()))
        if len(set(shapes)) < len(shapes) or 0 in itertools.chain.from_iterable(shapes):
            yield (
                f"aspect_ratios={list(self.aspect_ratios)} come to {self.shapes}, where two shapes are equal or one is "
                "empty: leave a ratio out."
            )

    def model_parameter(self, part: str) -> str:
        """The parameter that names the model of `part`: "vae", or "text_encoder" (with its tokenizer)."""
        return "encoder_model" if getattr(self, f"{part}_model") is None else f"{part}_model"

    def model_of(self, part: str) -> str:
        """The model of `part`: "vae", or "text_encoder" (with its tokenizer)."""
        return getattr(self, self.model_parameter(part))

    @property
    def caption_columns(self) -> list[str]:
        """The columns that `caption_column` names; [] if that is left open."""
        return [self.caption_column] if isinstance(self.caption_column, str) else list(self.caption_column or ())

    @property
    def num_captions(self) -> int:
        """The number of captions that are stored of each row; a row that has fewer repeats its own."""
        return max(len(self.caption_columns), self.max_captions)

    @property
    def most_encoders(self) -> int:
        return least_and_most(self.num_encoders)[1]

    @property
    def shapes(self) -> dict[int, list[tuple[int, int]]]:
        """{resolution: (width, height) of each of its shapes, by rising ratio}.

        A shape has about the area of the resolution's square: its width is the resolution times the root of the ratio,
        and its height the resolution divided by it. Both are rounded to multiples of `size_multiple`.
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
        """The folder of the drawn sample data, if no `input_uri` is given."""
        return storage.join(self.storage, "raw")

    @property
    def data_uri(self) -> str:
        """The raw rows' location: `input_uri`, or the drawn sample data."""
        return self.input_uri or self.raw_uri


# It stands in paths, URIs, tables and pages: characters that mean something there are refused.
RunName = Annotated[Text, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+=,-]{0,99}$")]
Which = Literal["model", "ema"]
SizeShares = Count | Shares[Count]
Objective = Literal["v_prediction", "epsilon", "flow"]
CaptionShares = Several[Positive] | None
Gamma = Positive | Literal["auto"] | None
Schedule = Literal["cosine", "constant"]
Strategy = Literal["ddp", "fsdp", "fsdp-full", "hsdp"]
Precision = Literal["fp32", "bf16"]
Timesteps = Literal["auto", "uniform", "importance", "logit_normal"]
AttentionKernel = Literal["auto", "cudnn", "flash", "efficient"]


@checked
class TrainingConfig(Parameters):
    """Latents -> a trained denoiser. `loop.train_loop_per_worker` takes it as it is."""

    # the data and the run
    latents_uri: str | Shares[str] = free("", LATENTS_URI)
    run_name: RunName = fixes_run("run", "name of the run, kept in storage/runs; an existing run is resumed")
    init_from: Model | None = fixes_run(None, "first weights: of a run, checkpoint, pipeline, denoiser; None: random")
    init_weights: Which = fixes_run("model", 'weights of a run in init_from: "model" (the last), "ema" (averaged)')
    # the model and its objective
    unet_config: Model = fixes_run("tiny", '"small", "sd2-base", "tiny-transformer", "transformer-600m", a config.json')
    image_encoder_model: Model | None = fixes_run(None, IMAGE_ENCODER)
    resolution: SizeShares = fixes_run(64, "pixels, of those encoded; or several with shares of steps: {32: 1, 64: 3}")
    prediction_type: Objective = fixes_run("v_prediction", 'training target: "v_prediction", "epsilon" (noise), "flow"')
    zero_terminal_snr: bool = fixes_run(False, 'whether the last timestep is noise alone; needs "v_prediction"')
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
    micro_batch_size: Count | None = free(None, "rows of one forward pass; None: a whole unit")
    units_per_step: Count | None = fixes_run(None, "units per global batch; None: the maximum number of workers")
    max_steps: Count = fixes_run(1000, "optimizer steps")
    learning_rate: Positive = fixes_run(3e-3, "peak learning rate of AdamW")
    warmup_steps: CountOrZero = fixes_run(60, "steps over which the learning rate rises to its peak")
    lr_schedule: Schedule = fixes_run("cosine", 'learning rate after warm-up: "cosine" (to 0 at max_steps), "constant"')
    adam_beta2: Share = fixes_run(0.99, "AdamW's second decay rate; 0.999 for runs of 100,000 steps")
    weight_decay: Amount = fixes_run(0.01, "weight decay of AdamW")
    seed: CountOrZero = fixes_run(0, "seed of weights, data order, noise and timesteps")
    # the machines
    num_training_workers: Count | Pair = free(1, "training processes, a GPU each with use_gpu; (least, most): elastic")
    use_gpu: bool = free(False, "whether to train and generate images on GPUs")
    training_accelerator_type: Name | None = free(None, 'kind of the trainers\' GPUs, such as "A100"; None: any')
    strategy: Strategy = free("ddp", 'data parallelism: "ddp"; sharded: "fsdp", "fsdp-full", "hsdp"')
    compile_unet: bool = free(False, "torch.compile of the denoiser's blocks")
    precision: Precision = fixes_run("fp32", 'precision of matrix products: "fp32", "bf16"; with fsdp of norms too')
    attention: AttentionKernel = free("auto", 'attention kernel on a GPU: "auto", "cudnn", "flash", "efficient"')
    deterministic: bool = free(False, "same bits in every run on GPUs of one kind; slow")
    activation_checkpointing: bool = free(False, "activations computed again in the backward pass, to save memory")
    # safety
    checkpoint_every: Count = free(250, "steps between checkpoints")
    checkpoints_kept: Count = free(2, "number of newest checkpoints kept, besides the best one")

    def __post_init__(self) -> None:
        units = self.units_per_step or self.most_workers
        self.set_derived(latents_uri=self.resolve_latents(), units_per_step=units)
        self.follow_objective()
        self.refuse([*self.find_problems(), *self.find_objective_problems()])

    def find_problems(self) -> Iterator[str]:
        """Sentences that say which parameters of the data, the batches and the kernels do not go together."""
        if self.caption_shares and abs(sum(self.caption_shares) - 1) > 1e-6:
            yield f"caption_shares={list(self.caption_shares)} add up to {sum(self.caption_shares):g}, not to 1."
        units, batch = f"units_per_step={self.units_per_step}", f"global_batch_size={self.global_batch_size}"
        if self.most_workers > self.units_per_step:
            yield (
                f"num_training_workers={self.num_training_workers} is more than {units}, and a worker without a unit "
                "only waits: use fewer workers, or more units in a new run."
            )
        if self.global_batch_size % self.units_per_step:
            yield f"{batch} does not divide into {units} equal units (by default the most workers): change either."
        elif self.unit_rows % (self.micro_batch_size or 1):
            yield (
                f"micro_batch_size={self.micro_batch_size} does not divide a unit of {self.unit_rows} rows ({batch}, "
                f"{units}): change one of the three."
            )
        if self.deterministic and self.compile_unet:
            yield "deterministic=True excludes compile_unet=True, by which sums vary: leave either out."
        if self.deterministic and self.attention != "auto":
            yield f"deterministic=True excludes attention={self.attention!r}, by which sums vary: leave either out."

    def follow_objective(self) -> None:
        """Replace each "auto" by what goes with the objective."""
        flow = self.prediction_type == "flow"
        gamma = None if flow or self.zero_terminal_snr else 5.0
        gamma = gamma if self.min_snr_gamma == "auto" else self.min_snr_gamma
        sampling = "logit_normal" if flow else "importance" if gamma else "uniform"
        chosen = {"min_snr_gamma": gamma, "timestep_sampling": sampling}
        self.set_derived(**{name: value for name, value in chosen.items() if getattr(self, name) == "auto"})

    def find_objective_problems(self) -> Iterator[str]:
        """Sentences that say which parameters of the objective do not go together."""
        flow, kind = self.prediction_type == "flow", f"prediction_type={self.prediction_type!r}"
        gamma = f"min_snr_gamma={self.min_snr_gamma}"
        if flow and self.min_snr_gamma is not None:
            yield f"{gamma} weights epsilon and v, not {kind}: set it to None."
        if flow and self.timestep_sampling == "importance":
            yield f"timestep_sampling='importance' goes by min-SNR weights, which {kind} does not have."
        if not flow and (self.timestep_sampling == "logit_normal" or self.timestep_shift != 1):
            yield f"timestep_sampling='logit_normal' and timestep_shift are for flow, not for {kind}."
        if self.zero_terminal_snr and self.prediction_type != "v_prediction":
            yield f"zero_terminal_snr=True needs v_prediction: {kind} says nothing where all is noise."
        elif self.zero_terminal_snr and self.min_snr_gamma is not None:
            yield (
                f"{gamma} with zero_terminal_snr=True gives the last timestep weight 0, and sampling begins there: set "
                "min_snr_gamma to None, or zero_terminal_snr to False."
            )

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

    @property
    def run_uri(self) -> str:
        return storage.join(self.storage, "runs", self.run_name)
