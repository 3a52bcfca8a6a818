"""The parameters of the online notebook's raw data and encoding. No Ray, no torch."""

from ..config import Crop, Name, PreprocessingConfig, checked, fixes_latents, fixes_rows


@checked
class OnlineConfig(PreprocessingConfig):
    """Raw images and captions that are encoded on the way to the trainers, cropped and flipped anew in each epoch."""

    width_column: Name | None = fixes_rows(None, "column of widths in pixels; with both, sizes are known in advance")
    height_column: Name | None = fixes_rows(None, "column of heights in pixels")
    random_crop: Crop = fixes_latents(1.0, "smallest crop, as a share of the largest square; 1: always the centre crop")
    horizontal_flip: bool = fixes_latents(False, "mirroring of half the images; not if captions say left and right")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [self.width_column, self.height_column]
        if None in sizes and any(sizes):
            raise ValueError(f"width_column={sizes[0]!r} and height_column={sizes[1]!r}: name both columns or neither.")
        if None in sizes and set(self.aspect_ratios) != {1.0}:
            raise ValueError(
                f"aspect_ratios={list(self.aspect_ratios)}, while encoding online, need width_column and height_column."
            )
