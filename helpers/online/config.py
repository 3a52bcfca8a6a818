"""The parameters of the online notebook's raw data and encoding. No Ray, no torch."""

from ..config import Count, Crop, OptionalText, PreprocessingConfig, Switch, checked, fixes_latents, fixes_rows, free


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
