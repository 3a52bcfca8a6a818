"""Images a second of the transform of JPEGs, in one process, against Pillow alone.

    python -m tests.benchmarks.transform_speed [--rounds 5]

Photographs of 2 megapixels (as textured as real ones, about 400 KB) at 256 and 512 pixels, and pictures of 96 x 64
pixels at 64. Pillow decodes all pixels and resizes the centre crop by Lanczos, as `raw.images` did once. PyTorch has
one thread, as in Ray's tasks. The two alternate; the ratio of their medians is printed.
"""

import functools
import io
import time

import numpy as np
import torch
from PIL import Image, ImageOps

from helpers.raw import images
from tests.benchmarks import record
from tests.unit.raw.test_images import encoded, leaves


def by_pillow(data, side):
    image = Image.open(io.BytesIO(data))
    ImageOps.exif_transpose(image, in_place=True)
    image = image.convert("RGB")
    square = image.crop(images.center_crop(image.size)[0])
    return np.asarray(square.resize((side, side), Image.Resampling.LANCZOS))


def by_transform(data, side):
    return images.make_pixels(data, shapes={side: [(side, side)]}).pixels[side, side]


def rate(function, data, side, count, _):
    started = time.perf_counter()
    for _ in range(count):
        function(data, side)
    return count / (time.perf_counter() - started)


def main():
    given = record.options(__doc__, rounds=5)
    torch.set_num_threads(1)
    picture = leaves(1600, 1200)
    photograph, small = (encoded(one, "JPEG", quality=80) for one in (picture, picture.resize((96, 64))))
    summary, details = {}, {"bytes": len(photograph)}
    for what, data, side, count in (
        ("2 MP", photograph, 256, 40),
        ("2 MP", photograph, 512, 20),
        ("small", small, 64, 2000),
    ):
        ways = {"Pillow": by_pillow, "transform": by_transform}
        calls = {name: functools.partial(rate, way, data, side, count) for name, way in ways.items()}
        rates = record.in_turns(given.rounds, calls)
        ratio, said = record.compare(rates, "transform", "Pillow")
        summary[f"transform of JPEGs, {what} at {side} pixels, against Pillow"] = said
        details[f"{what}, {side}"] = {"images_per_second": rates, "ratio": ratio}
    record.write("transform_speed", summary, **details)


if __name__ == "__main__":
    main()
