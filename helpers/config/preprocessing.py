"""The parameters of Preprocessing.ipynb and, for online runs, of the encoding. No Ray, no torch."""

import os
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from .. import storage
from .parameters import (
    LATENTS_URI,
    Amount,
    Count,
    Location,
    Model,
    OptionalCount,
    OptionalText,
    Parameters,
    Positive,
    Several,
    Switch,
    T,
    Text,
    Workers,
    checked,
    fixes_latents,
    fixes_rows,
    free,
    least_and_most,
    must_be,
)


def sort_unique(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(sorted(set(values)))


Sorted = Annotated[Several[T], Field(min_length=1), AfterValidator(sort_unique)]
Sizes = Annotated[Sorted[Annotated[int, Field(ge=8)]], must_be("a list of sizes of at least 8 pixels, such as [64]")]
Ratios = Annotated[Sorted[Positive], must_be("a list of numbers of more than 0 (width / height), such as [0.5, 1, 2]")]
Captions = Annotated[Text | Several[Text] | None, must_be("a column, a list of several, or None")]
LargestRatio = Annotated[float | None, must_be("a number of at least 1 (longer side / shorter side), or None", ge=1)]
OptionalModel = Annotated[Annotated[Model, Field(min_length=1)] | None, must_be("a model, or None")]
Crop = Annotated[float, must_be("a share of the shorter side: more than 0, at most 1 (the centre square)", gt=0, le=1)]
InputFormat = Literal["auto", "parquet", "webdataset", "imagefolder", "arrow"]
TextCleaning = Literal["none", "lower", "ftfy"]
EncoderPrecision = Literal["fp32", "fp16", "bf16"]
Statistics = Literal["moments", "mean"]
Gpus = Annotated[float, must_be("0 (CPU), a share of a GPU, or more", ge=0)]


def pool_size(num_encoders: int | Sequence[int]) -> dict[str, int]:
    """Arguments of Ray Data's `ActorPoolStrategy`. With a pair, Ray Data chooses the number of actors in between."""
    least, most = least_and_most(num_encoders)
    return {"min_size": least, "max_size": most}


@checked
class PreprocessingConfig(Parameters):
    """Raw images and captions -> latents."""

    image_column_is_found: ClassVar[bool] = False  # by `layout.look`; no parameter

    # the input
    input_uri: Location = free("", "raw data: a file, folder or pattern, local or s3://; empty: drawn sample data")
    input_format: InputFormat = fixes_rows(
        "auto", '"auto" (what is there), "parquet", "webdataset", "imagefolder", "arrow"'
    )
    row_filter: Text = fixes_rows("", "expression on the columns; rows that fail it are left out")
    image_column: OptionalText = fixes_latents(None, "column of images, their bytes or paths; None: what is there")
    caption_column: Captions = fixes_rows(None, "column of captions, or several; None: caption, text or txt")
    # `prepare.check` records `num_captions` instead.
    max_captions: Count = free(1, "maximum number of captions of a row, if caption_column holds lists or lines")
    id_column: OptionalText = fixes_rows(None, "column of ids; None: hash, key, __key__, id or the row's place")
    limit: OptionalCount = fixes_rows(None, "maximum number of rows to read; None: all")
    # the transform
    resolutions: Sizes = fixes_rows((32, 64), "pixels; all sizes are encoded in one pass")
    aspect_ratios: Ratios = fixes_rows((1.0,), "width / height; images get the nearest: [0.5, 0.75, 1, 1.33, 2]")
    size_multiple: Count = fixes_rows(16, "pixels; sides of shapes other than squares are multiples of it; 64 for SD 2")
    upscale: Switch = fixes_rows(False, "whether images smaller than a resolution are enlarged; False: left out")
    max_aspect_ratio: LargestRatio = fixes_rows(None, "maximum of longer side / shorter side, such as 2; None: any")
    # The default is Pillow's own limit.
    max_pixels: Count = fixes_rows(89_478_485, "maximum pixels of an image; larger ones are rejected unopened")
    # The encoder. It fixes the latents too: `prepare.describe_encoder` records it.
    encoder_model: Model = free("tiny-sd", '"tiny-sd" (in helpers), or a folder or hub id in diffusers layout')
    encoder_revision: OptionalText = free(None, "commit, tag or branch of a hub id; None: the newest, kept on resuming")
    vae_model: OptionalModel = free(None, "model with another VAE; None: encoder_model")
    vae_revision: OptionalText = free(None, "commit, tag or branch of a hub id, as encoder_revision")
    text_encoder_model: OptionalModel = free(None, "model with another text encoder; None: encoder_model")
    text_encoder_revision: OptionalText = free(None, "commit, tag or branch of a hub id, as encoder_revision")
    # Captions are encoded for it: `maximum_tokens` and `text_cleaning` follow it by default.
    unet_config: Model = free("tiny", '"small", "sd2-base", "tiny-transformer", "transformer-600m", a config.json')
    maximum_tokens: OptionalCount = fixes_latents(None, "maximum tokens of a caption, without padding; None: padded")
    text_cleaning: TextCleaning = fixes_latents("none", 'cleaning of captions: "none", "lower" (case), "ftfy" (repair)')
    encoder_precision: EncoderPrecision = free("fp32", 'precision of the encoders: "fp32", "fp16", "bf16"')
    encoder_batch_size: Count = free(32, "images per batch of an encoder")
    compile_encoder: Switch = free(False, "torch.compile of the VAE's encoder, for each shape of images")
    # the output
    latents: Statistics = fixes_latents("moments", 'output of the VAE: "moments" (mean, std), "mean" (half the space)')
    latents_uri: Location = free("", LATENTS_URI)
    # the machines
    num_transform_workers: Count = free(1, "parallel CPU tasks that decode and resize")
    num_encoders: Workers = free(1, "encoder actors; (least, most): as many as there is work and room for")
    gpus_per_encoder: Gpus = free(0, "GPUs per encoder; 0: encode on CPUs; 0.5: two encoders share a GPU")
    encoder_accelerator_type: OptionalText = free(None, 'kind of the encoders\' GPUs, such as "A10G"; None: any')
    dollars_per_hour: Amount = free(0.0, "price of all machines of the job together, for the report")

    def __post_init__(self) -> None:
        self.set_derived(latents_uri=self.latents_uri or storage.join(self.storage, "latents"))
        for part in ("encoder", "vae", "text_encoder"):
            self.add_revision(f"{part}_model", f"{part}_revision")
        if len(set(self.caption_columns)) < len(self.caption_columns) or self.caption_column in ("", ()):
            raise ValueError(f"caption_column={self.caption_column!r} must name one column, or several different ones.")
        if len(self.caption_columns) > 1 and self.max_captions > 1:
            raise ValueError(
                f"max_captions={self.max_captions} is for a column of lists, and caption_column="
                f"{self.caption_column!r} names several columns, one for each caption: set max_captions back to 1."
            )
        self.check_shapes()

    def add_revision(self, parameter: str, revision_parameter: str) -> None:
        """Make the model "hub/id@revision". Raises ValueError for a revision of a folder, or of no model."""
        model, revision = getattr(self, parameter), getattr(self, revision_parameter)
        if revision is None:
            return
        if model is None or model == "tiny-sd" or os.path.exists(model):
            raise ValueError(
                f"{revision_parameter}={revision!r} is that of a hub id, and {parameter}={model!r} is "
                f"{'none' if model is None else 'a folder'}: leave it None."
            )
        self.set_derived(**{parameter: model.removesuffix(f"@{revision}") + f"@{revision}"})

    def model_parameter(self, part: str) -> str:
        """The parameter that names the model of `part`: "vae", or "text_encoder" (with its tokenizer)."""
        return "encoder_model" if getattr(self, f"{part}_model") is None else f"{part}_model"

    def model_of(self, part: str) -> str:
        """The model of `part`: "vae", or "text_encoder" (with its tokenizer)."""
        return getattr(self, self.model_parameter(part))

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
    def caption_columns(self) -> list[str]:
        """The columns that `caption_column` names; [] if that is left to `layout.look`."""
        return [self.caption_column] if isinstance(self.caption_column, str) else list(self.caption_column or ())

    @property
    def num_captions(self) -> int:
        """The number of captions that are stored of each row; a row that has fewer repeats its own."""
        return max(len(self.caption_columns), self.max_captions)

    @property
    def captions_encoded(self) -> int:
        """The number of captions of each row that the encoders encode."""
        return self.num_captions

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


@checked
class OnlineConfig(PreprocessingConfig):
    """Raw images and captions that are encoded on the way to the trainers, cropped and flipped anew in each epoch.

    With `keep_latents`, they are encoded in the first epoch only, with the centre crop and without flips.
    """

    width_column: OptionalText = fixes_rows(None, "column of widths in pixels; with both, sizes are known in advance")
    height_column: OptionalText = fixes_rows(None, "column of heights in pixels")
    read_ahead_bytes: Count = free(2**31, "bytes of large row groups kept in memory, to read each once")
    random_crop: Crop = fixes_latents(1.0, "smallest crop, as a share of the largest square; 1: always the centre crop")
    horizontal_flip: Switch = fixes_latents(False, "mirroring of half the images; not if captions say left and right")
    # `train.kept` refuses another value when a run is resumed.
    keep_latents: Switch = free(False, "whether later epochs read what the first one encodes; not with random crops")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [self.width_column, self.height_column]
        if None in sizes and any(sizes):
            raise ValueError(f"width_column={sizes[0]!r} and height_column={sizes[1]!r}: name both columns or neither.")
        if None in sizes and set(self.aspect_ratios) != {1.0}:
            raise ValueError(
                f"aspect_ratios={list(self.aspect_ratios)}, while encoding online, need width_column and height_column."
            )

    @property
    def captions_encoded(self) -> int:
        """1, because each epoch samples one of a row's captions; all of them if latents are kept."""
        return self.num_captions if self.keep_latents else 1
