"""Captioned shapes: a synthetic data set of drawn images with captions, as many as are asked for.

A caption names everything that its image shows, so `detect` can read the attributes of a generated image,
`agreement` counts how many images match their prompts, and `shape_overlap` measures how clean a shape is.

- One object: "a large red circle in the top left on a blue background". 8 background colours x 7
  other colours x 3 shapes x 2 sizes x 9 positions = 3,024 captions.
- Two objects: "a small red circle left of a large white square on a blue background". 8 x 7 x 6
  colours x 9 shapes x 4 sizes x 4 relations = 48,384 captions; drawn only by a `two_object_share`.
- Image number `index` is a function of (seed, index) alone. The exact position of an object within its ninth of
  the image is random, so many images share a caption.
- Held out: captions whose CRC-32 is divisible by 10 (295 and 4,887 of them) are never drawn with
  split="train", which is what `write_data_set` writes. Evaluate on `held_out_prompts`.

Needs numpy, Pillow and pyarrow. Licence: Apache-2.0, like the code.
"""

import io
import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations, product

import numpy as np
import pyarrow as pa
from PIL import Image, ImageDraw

from .. import storage
from ..latents.parquet import open_parquet, write_table

# Colours that can be told apart after blur and JPEG: the nearest two, blue and purple, are 115 of 255 apart.
COLORS = {
    "red": (214, 40, 40),
    "green": (48, 150, 60),
    "blue": (40, 80, 210),
    "yellow": (245, 210, 60),
    "purple": (150, 60, 180),
    "cyan": (70, 200, 215),
    "white": (245, 245, 245),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle")
# Lengths are fractions of the image's side: a circle's radius, half of a square's side. Areas differ as well as
# outlines, so a small square whose corners a VAE has rounded is not taken for a circle.
SIZES = {"small": 0.12, "large": 0.18}
POSITIONS = {
    "in the top left": (0.26, 0.26),
    "at the top": (0.5, 0.26),
    "in the top right": (0.74, 0.26),
    "at the left": (0.26, 0.5),
    "in the center": (0.5, 0.5),
    "at the right": (0.74, 0.5),
    "in the bottom left": (0.26, 0.74),
    "at the bottom": (0.5, 0.74),
    "in the bottom right": (0.74, 0.74),
}
RELATIONS = ("left of", "right of", "above", "below")
JITTER = 0.04
TRIANGLE_CIRCUMRADIUS = 1.2  # of the radius: the largest triangle that is inside the image in every position
SUPERSAMPLING = 4
WORKING_SIZE = 64  # pixels: the detector resizes images to this
_OBJECT = rf"a ({'|'.join(SIZES)}) ({'|'.join(COLORS)}) ({'|'.join(SHAPES)})"
_BACKGROUND = rf"on a ({'|'.join(COLORS)}) background"
_ONE_OBJECT = re.compile(rf"{_OBJECT} ({'|'.join(POSITIONS)}) {_BACKGROUND}")
_TWO_OBJECTS = re.compile(rf"{_OBJECT} ({'|'.join(RELATIONS)}) {_OBJECT} {_BACKGROUND}")


@dataclass(frozen=True)
class SceneObject:
    """One object. `position` is one of POSITIONS, or None in a scene of two objects, which has a relation instead."""

    color: str
    shape: str
    size: str
    position: str | None = None


@dataclass(frozen=True)
class Scene:
    """What an image shows: one object with a position, or two with a relation (first to second)."""

    background: str
    objects: tuple[SceneObject, ...]
    relation: str | None = None

    @property
    def caption(self) -> str:
        named = [f"a {o.size} {o.color} {o.shape}" for o in self.objects]
        where = self.objects[0].position if self.relation is None else f"{self.relation} {named[1]}"
        return f"{named[0]} {where} on a {self.background} background"


def parse(caption: str) -> Scene:
    """The scene that `caption` describes: `parse(scene.caption) == scene`. ValueError for other text."""
    if match := _ONE_OBJECT.fullmatch(caption):
        size, color, shape, position, background = match.groups()
        scene = Scene(background, (SceneObject(color, shape, size, position),))
    elif match := _TWO_OBJECTS.fullmatch(caption):
        size, color, shape, relation, size_2, color_2, shape_2, background = match.groups()
        scene = Scene(background, (SceneObject(color, shape, size), SceneObject(color_2, shape_2, size_2)), relation)
    else:
        raise ValueError(
            f"{caption!r} is not a caption of captioned shapes, such as "
            '"a large red circle in the top left on a blue background"'
        )
    if len({background, *(o.color for o in scene.objects)}) != 1 + len(scene.objects):
        raise ValueError(f"{caption!r} uses one colour twice: objects and background must differ in colour")
    return scene


def is_held_out(caption: str) -> bool:
    """Whether `caption` is kept out of training data: CRC-32 of its UTF-8 bytes divisible by 10."""
    return zlib.crc32(caption.encode()) % 10 == 0


@cache
def captions(num_objects: int = 1, split: str = "all") -> tuple[str, ...]:
    """Every caption with `num_objects`, 1 or 2, in a fixed order. `split` as in `scene`."""
    if num_objects == 1:
        scenes = (
            Scene(background, (SceneObject(color, shape, size, position),))
            for (background, color), shape, size, position in product(permutations(COLORS, 2), SHAPES, SIZES, POSITIONS)
        )
    else:
        scenes = (
            Scene(background, (SceneObject(color, shape, size), SceneObject(color_2, shape_2, size_2)), relation)
            for (background, color, color_2), shape, shape_2, size, size_2, relation in product(
                permutations(COLORS, 3), SHAPES, SHAPES, SIZES, SIZES, RELATIONS
            )
        )
    return tuple(s.caption for s in scenes if _in_split(s.caption, split))


def _in_split(caption: str, split: str) -> bool:
    if split not in ("train", "held_out", "all"):
        raise ValueError(f'split is {split!r}; it must be "train", "held_out" or "all"')
    return split == "all" or is_held_out(caption) == (split == "held_out")


def scene(index: int, seed: int = 0, two_object_share: float = 0.0, split: str = "train") -> Scene:
    """Scene number `index`: the same for the same arguments, any non-negative index.

    `two_object_share` (0 to 1) is the probability of two objects. `split`: "train" leaves the held-out
    captions out, "held_out" draws only them, "all" ignores the difference. ValueError for anything else.
    """
    if not 0 <= two_object_share <= 1:
        raise ValueError(f"two_object_share is {two_object_share}; it is a probability, from 0 to 1")
    rng = np.random.default_rng([seed, index])
    while True:
        num_objects = 2 if rng.random() < two_object_share else 1
        # One call for all choices: each call takes microseconds, and there may be millions of scenes.
        choice = rng.integers([8, 7, 6, 3, 3, 2, 2, 9, 4]).tolist()
        colors = list(COLORS)
        background, color, color_2 = (colors.pop(c) for c in choice[:3])
        sizes, positions = list(SIZES), list(POSITIONS)
        first = SceneObject(color, SHAPES[choice[3]], sizes[choice[5]])
        second = SceneObject(color_2, SHAPES[choice[4]], sizes[choice[6]])
        if num_objects == 1:
            found = Scene(background, (replace(first, position=positions[choice[7]]),))
        else:
            found = Scene(background, (first, second), RELATIONS[choice[8]])
        if _in_split(found.caption, split):
            return found


def draw_scene(scene: Scene, rng_or_seed: np.random.Generator | int | list[int], size: int = 64) -> Image.Image:
    """An RGB image of `scene`, of `size` x `size` pixels, 4x supersampled.

    `rng_or_seed` (an argument of `numpy.random.default_rng`) decides the random offsets of the objects.
    """
    rng = np.random.default_rng(rng_or_seed)
    side = size * SUPERSAMPLING
    picture = Image.new("RGB", (side, side), COLORS[scene.background])
    pen = ImageDraw.Draw(picture)
    for thing, (x, y) in zip(scene.objects, _centres(scene, rng), strict=True):
        x, y, radius = x * side, y * side, SIZES[thing.size] * side
        if thing.shape == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLORS[thing.color])
        elif thing.shape == "square":
            pen.rectangle((x - radius, y - radius, x + radius, y + radius), fill=COLORS[thing.color])
        else:
            tall = radius * TRIANGLE_CIRCUMRADIUS
            wide = tall * np.sqrt(3) / 2
            pen.polygon([(x, y - tall), (x - wide, y + tall / 2), (x + wide, y + tall / 2)], fill=COLORS[thing.color])
    return picture.reduce(SUPERSAMPLING)


def _centres(scene: Scene, rng: np.random.Generator) -> list[tuple[float, float]]:
    jitter = rng.uniform(-JITTER, JITTER, 4)
    if scene.relation is None:
        x, y = POSITIONS[scene.objects[0].position]
        return [(x + jitter[0], y + jitter[1])]
    along = (0.26 + jitter[0], 0.74 + jitter[1])  # far enough apart for two large ones
    across = 0.5 + 3 * jitter[2:]
    if scene.relation in ("right of", "below"):
        along = along[::-1]
    if scene.relation in ("left of", "right of"):
        return list(zip(along, across, strict=True))
    return list(zip(across, along, strict=True))


def draw_sample(
    index: int, seed: int = 0, two_object_share: float = 0.0, split: str = "train", size: int = 64
) -> tuple[Image.Image, str]:
    """Image number `index` (RGB, `size` x `size`) and its caption. Arguments as in `scene`."""
    what = scene(index, seed, two_object_share, split)
    return draw_scene(what, [seed, index, 1], size), what.caption


def held_out_prompts(num: int, seed: int = 0) -> list[str]:
    """`num` different one-object captions that training never sees, with the values of each attribute balanced.

    ValueError if there are fewer than `num`.
    """
    left = list(captions(1, "held_out"))
    if num > len(left):
        raise ValueError(f"{num} held-out prompts asked for; there are {len(left)}: ask for that many at most")
    np.random.default_rng([seed, 2]).shuffle(left)
    values = {caption: set(attributes(caption).items()) for caption in left}
    times_used, chosen = {}, []
    for _ in range(num):
        best = min(left, key=lambda c: sum(times_used.get(v, 0) * _NUM_VALUES.get(v[0], 0) for v in values[c]))
        left.remove(best)
        chosen.append(best)
        for value in values[best]:
            times_used[value] = times_used.get(value, 0) + 1
    return chosen


_NUM_VALUES = {"background": 8, "color": 8, "shape": 3, "size": 2, "position": 9}


def attributes(caption: str) -> dict[str, str | int]:
    """What `detect` finds in a perfect image for `caption`.

    One object: background, count, color, shape, size, position. Two: background, count, relation, and
    color, shape, size of the left or upper object, then color_2, shape_2, size_2 of the other: "A right of B"
    and "B left of A" are the same image, so both read "left of". ValueError as in `parse`.
    """
    what = parse(caption)
    objects, relation = what.objects, what.relation
    if relation in ("right of", "below"):
        objects, relation = objects[::-1], {"right of": "left of", "below": "above"}[relation]
    first = objects[0]
    found = {
        "background": what.background,
        "count": len(objects),
        "color": first.color,
        "shape": first.shape,
        "size": first.size,
    }
    if relation is None:
        return found | {"position": first.position}
    second = objects[1]
    return found | {"color_2": second.color, "shape_2": second.shape, "size_2": second.size, "relation": relation}


_PALETTE = np.array(list(COLORS.values()), np.float32)
_NAMES = list(COLORS)
_ROW_COLUMN = (np.mgrid[:WORKING_SIZE, :WORKING_SIZE] + 0.5).astype(np.float32) / WORKING_SIZE
_Y, _X = _ROW_COLUMN
CORNER = 1.5 / WORKING_SIZE  # radius of the template's corners: blur and VAEs round those of a square
_BLUR = 1 / WORKING_SIZE  # templates have antialiased edges, one pixel wide
# Radii that `shape_overlap` tries: from a third below the small size to a third above the large one.
_RADII = np.arange(0.08, 0.24, 0.0025).tolist()


def detect(picture: Image.Image | np.ndarray) -> dict[str, str | int | None]:
    """Attributes read from an image (PIL, or uint8 RGB (H, W, 3)) of any size; its centre square is used.

    Returns the keys of `attributes`. A value is None if there is no object, or if its shape fits none of SHAPES.
    `count` is 0, 1, 2 or 3 ("more than two").
    """
    pixels = _working_copy(picture)
    background, background_rgb, objects = _find_objects(pixels)
    found = {"background": _NAMES[background], "count": 0, "color": None, "shape": None, "size": None, "position": None}
    if not objects:
        return found
    found["count"] = min(len(objects), 3)

    if len(objects) == 2:
        offset = np.abs(objects[0][1] - objects[1][1])
        axis = int(offset[1] > offset[0])
        first, second = (
            (_NAMES[color], *_fit(pixels, background_rgb, color, region)[:2])
            for color, _, region in sorted(objects, key=lambda item: item[1][axis])
        )
        del found["position"]
        found |= zip(("color", "shape", "size"), first, strict=True)
        found |= zip(("color_2", "shape_2", "size_2"), second, strict=True)
        return found | {"relation": ("left of", "above")[axis]}

    color, _, region = objects[0]
    shape, size, centre, rest = _fit(pixels, background_rgb, color, region)
    if len(objects) == 1 and rest > 0.4 * np.pi * SIZES["small"] ** 2:
        found["count"] = 2  # a second object of the same colour
    row, column = (int(np.digitize(c, (0.38, 0.62))) for c in (centre[1], centre[0]))
    position = list(POSITIONS)[3 * row + column]
    return found | {"color": _NAMES[color], "shape": shape, "size": size, "position": position}


def shape_overlap(picture: Image.Image | np.ndarray, prompt: str) -> float:
    """How clean the drawn shape is: intersection over union with the ideal shape that fits best, in [0, 1].

    The ideal shape is any of SHAPES at any size around the drawn one's centre, so an image can be wrong and score
    high. The object in the prompt's colour is measured; if there is none, the largest object. With two objects, the
    mean is returned; without an object, NaN. Drawn images have about 0.967.
    """
    pixels = _working_copy(picture)
    _, background_rgb, objects = _find_objects(pixels)
    colors = [_NAMES.index(thing.color) for thing in parse(prompt).objects]
    measured = [item for item in objects if item[0] in colors] or objects[:1]
    overlaps = [
        max(_overlaps(*_coverage(pixels, background_rgb, color, region), _RADII).values())
        for color, _, region in measured
    ]
    return float(np.mean(overlaps)) if overlaps else float("nan")


def _find_objects(pixels: np.ndarray) -> tuple[int, np.ndarray, list[tuple[int, np.ndarray, np.ndarray]]]:
    """The background's colour (index and RGB), and the objects by falling area, each as (colour, centre, region).

    A region (H, W) masks the pixels that may belong to the object: of two objects, those that are nearer to it.
    """
    frame = np.ones(pixels.shape[:2], bool)  # two pixels wide
    frame[2:-2, 2:-2] = False
    background_rgb = np.median(pixels[frame], 0)
    background = _nearest(background_rgb[None])[0]
    # Only pixels whose eight neighbours have the same colour count: on edges two colours mix to a third.
    labels = _nearest(pixels.reshape(-1, 3)).reshape(WORKING_SIZE, WORKING_SIZE)
    inner = np.zeros_like(labels, bool)
    neighbourhoods = np.lib.stride_tricks.sliding_window_view(labels, (3, 3))
    inner[1:-1, 1:-1] = (neighbourhoods == labels[1:-1, 1:-1, None, None]).all(axis=(2, 3))
    area = np.bincount(labels[inner], minlength=len(_NAMES))
    area[background] = 0
    colors = [c for c in np.argsort(-area) if area[c] >= 10]  # the smallest triangle has about 40
    centres = [np.array([_X[inner & (labels == c)].mean(), _Y[inner & (labels == c)].mean()]) for c in colors]
    regions = [np.ones_like(inner)] * len(colors)
    if len(colors) == 2:
        distances = [np.hypot(_X - x, _Y - y) for x, y in centres]
        regions = [distances[0] < distances[1], distances[0] >= distances[1]]
    return background, background_rgb, list(zip(colors, centres, regions, strict=True))


def _nearest(pixels_NC: np.ndarray) -> np.ndarray:
    """Index of the nearest palette colour of each pixel, (N,)."""
    # |p - c|^2 without |p|^2, which does not change the order
    return np.argmin((_PALETTE**2).sum(1) - 2 * pixels_NC @ _PALETTE.T, axis=1)


def _coverage(
    pixels: np.ndarray, background_rgb: np.ndarray, color: int, region: np.ndarray
) -> tuple[np.ndarray, tuple[float, float]]:
    """How much of each pixel an object covers, (H, W) in 0..1, and the object's centre (x, y)."""
    direction = _PALETTE[color] - background_rgb
    alpha = (pixels - background_rgb) @ direction / (direction @ direction)
    alpha = np.clip(2 * alpha - 0.5, 0, 1) * region  # steeper, because noise of the background would move the centre
    mass = max(alpha.sum(), 1)
    return alpha, ((alpha * _X).sum() / mass, (alpha * _Y).sum() / mass)


def _overlaps(alpha: np.ndarray, centre: tuple[float, float], radii: Iterable[float]) -> dict[tuple[str, float], float]:
    """{(shape, radius): intersection over union of `alpha` and the template} for all shapes and the given radii."""
    templates = {(shape, radius): _template(shape, radius, *centre) for shape in SHAPES for radius in radii}
    return {key: np.minimum(alpha, t).sum() / np.maximum(alpha, t).sum() for key, t in templates.items()}


def _fit(pixels: np.ndarray, background_rgb: np.ndarray, color: int, region: np.ndarray):
    """Shape and size of the template that overlaps best, the object's centre, and the area outside of the template."""
    alpha, centre = _coverage(pixels, background_rgb, color, region)
    overlaps = _overlaps(alpha, centre, SIZES.values())
    shape, radius = best = max(overlaps, key=overlaps.get)
    rest = (alpha * (1 - _template(shape, radius + 3 * _BLUR, *centre))).sum() / WORKING_SIZE**2
    size = next(name for name in SIZES if SIZES[name] == radius)
    return shape if overlaps[best] > 0.6 else None, size, centre, rest


def _template(shape: str, radius: float, x: float, y: float) -> np.ndarray:
    """Coverage (H, W) in 0..1 of a shape around (x, y), from its signed distance."""
    dx, dy = _X - x, _Y - y
    if shape == "circle":
        distance = np.hypot(dx, dy) - radius
    elif shape == "square":
        flat_x, flat_y = (np.abs(d) - radius + CORNER for d in (dx, dy))
        distance = (
            np.hypot(np.maximum(flat_x, 0), np.maximum(flat_y, 0)) + np.minimum(np.maximum(flat_x, flat_y), 0) - CORNER
        )
    else:
        inradius = radius * TRIANGLE_CIRCUMRADIUS / 2
        distance = np.maximum(dy, np.abs(dx) * np.sqrt(3) / 2 - dy / 2) - inradius
    return np.clip(0.5 - distance / _BLUR, 0, 1)


def _working_copy(picture: Image.Image | np.ndarray) -> np.ndarray:
    """The centre square as float32 (64, 64, 3)."""
    pixels_HWC = np.asarray(picture.convert("RGB") if isinstance(picture, Image.Image) else picture)
    if pixels_HWC.ndim != 3 or pixels_HWC.shape[2] != 3 or pixels_HWC.dtype != np.uint8:
        raise ValueError(f"pixels are {pixels_HWC.dtype} of shape {pixels_HWC.shape}; detect takes uint8 (H, W, 3)")
    height, width, _ = pixels_HWC.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = Image.fromarray(pixels_HWC[top : top + side, left : left + side])
    method = Image.Resampling.BOX if side > WORKING_SIZE else Image.Resampling.BILINEAR
    return np.asarray(square.resize((WORKING_SIZE, WORKING_SIZE), method), np.float32)


def wrong_attributes(picture: Image.Image | np.ndarray, prompt: str) -> dict[str, tuple[str | int | None, str | int]]:
    """{attribute: (found, expected)} of the attributes in which an image differs from its prompt; {}: all right."""
    found = detect(picture)
    return {key: (found.get(key), value) for key, value in attributes(prompt).items() if found.get(key) != value}


def agreement(pictures: list, prompts: list[str]) -> dict[str, float]:
    """Share of images (PIL or uint8 arrays (H, W, 3)) that show what their prompt says.

    One entry per attribute, over the prompts that have it, and "all": every attribute right at once.
    ValueError for lists of different lengths, for empty ones, and for prompts that are not captions of this data set.
    """
    if len(pictures) != len(prompts) or not prompts:
        raise ValueError(f"{len(pictures)} pictures and {len(prompts)} prompts: give as many of each, at least one")
    right = {}
    for picture, prompt in zip(pictures, prompts, strict=True):
        wrong = wrong_attributes(picture, prompt)
        for key in attributes(prompt):
            right.setdefault(key, []).append(key not in wrong)
        right.setdefault("all", []).append(not wrong)
    return {key: float(np.mean(hits)) for key, hits in right.items()}


_MARKER = b"captioned_shapes"


def write_data_set(
    folder: str | os.PathLike, num_rows: int, seed: int = 0, rows_per_file: int = 2000, spoilt_share: float = 0.0
) -> str:
    """Write rows 0 to num_rows - 1 of the training split to `folder` (a path or URI) as LAION-style Parquet.

    Columns: hash int64 (unique, a function of seed and index), caption string, width and height float64,
    jpg binary: JPEG, every fourth row a PNG; a third of them wider or higher than 64 pixels. A `spoilt_share` of the
    rows, evenly spread, is damaged as rows of a real download are, see `corrupt`. Each file is written atomically.
    A second call with the same arguments writes nothing; with others it replaces the files. ValueError if `folder`
    holds Parquet files of another origin, or for counts that are not positive. Returns `folder`.
    """
    if num_rows < 1 or rows_per_file < 1:
        raise ValueError(f"num_rows={num_rows} and rows_per_file={rows_per_file} must both be at least 1")
    call = {"version": 4, "num_rows": num_rows, "seed": seed, "rows_per_file": rows_per_file}
    # The two constants were arguments of earlier releases, whose files are kept.
    call |= {"two_object_share": 0.0, "size": 64, "spoilt_share": spoilt_share}
    marker = json.dumps(call).encode()
    starts = {f"shapes-{i:05d}.parquet": i * rows_per_file for i in range(-(-num_rows // rows_per_file))}

    for uri in storage.list_files(folder, ".parquet"):
        with open_parquet(uri) as file:
            found = (file.schema_arrow.metadata or {}).get(_MARKER)
        if found is None:
            raise ValueError(f"{uri} was not written by write_data_set; choose a folder without other Parquet files")
        if found == marker and storage.name(uri) in starts:
            del starts[storage.name(uri)]
        else:
            storage.delete(uri)  # before anything new is written: a reader never sees files of two calls

    for name, start in starts.items():
        table = _table(range(start, min(start + rows_per_file, num_rows)), seed, spoilt_share)
        table = table.replace_schema_metadata({_MARKER: marker})
        write_table(storage.join(folder, name), table, row_group_size=500)
    return str(folder)


def corrupt(data: bytes, caption: str, number: int) -> tuple[bytes | None, str | None]:
    """The image's bytes and the caption of damaged row `number`: seven kinds of damage in turn."""
    tiny = io.BytesIO()
    Image.new("RGB", (1, 1)).save(tiny, "GIF")
    return [
        (data[: len(data) // 2], caption),
        (b"", caption),
        (b"<html>404 Not Found</html>", caption),
        (data, None),
        (data, "  "),
        (tiny.getvalue(), caption),
        (None, caption),
    ][number % 7]


def _widen(picture: Image.Image, index: int) -> Image.Image:
    """The image, made wider by half (one in six) or higher (one in six), so that there is something to crop.

    The background grows on both sides: the centre square is the image as it was drawn.
    """
    margin = picture.width // 4
    sides = {0: (margin, 0), 3: (0, margin)}.get(index % 6, (0, 0))
    larger = Image.new("RGB", (picture.width + 2 * sides[0], picture.height + 2 * sides[1]), picture.getpixel((0, 0)))
    larger.paste(picture, sides)
    return larger


def _table(indices: range, seed: int, spoilt_share: float) -> pa.Table:
    rows = []
    for index in indices:
        picture, caption = draw_sample(index, seed)
        picture = _widen(picture, index)
        data = _encode(picture, "PNG" if index % 4 == 3 else "JPEG")
        number = int((index + 1) * spoilt_share)  # rises by one at each damaged row
        damaged = number != int(index * spoilt_share)
        rows.append((*(corrupt(data, caption, number) if damaged else (data, caption)), picture.size))
    return pa.table(
        {
            "hash": pa.array([_hash(seed, index) for index in indices], pa.int64()),
            "caption": pa.array([caption for _, caption, _ in rows], pa.string()),
            "width": pa.array([float(width) for _, _, (width, _) in rows], pa.float64()),
            "height": pa.array([float(height) for _, _, (_, height) in rows], pa.float64()),
            "jpg": pa.array([data for data, _, _ in rows], pa.binary()),
        }
    )


def _encode(picture: Image.Image, file_format: str) -> bytes:
    data = io.BytesIO()
    # 4:4:4: chroma subsampling would blur the edges of shapes this small
    picture.save(data, file_format, **({"quality": 95, "subsampling": 0} if file_format == "JPEG" else {}))
    return data.getvalue()


def _hash(seed: int, index: int) -> int:
    """A bijection of 63-bit numbers (odd factors and xor-shifts), so different rows never share a hash."""
    mask = (1 << 63) - 1
    x = ((seed << 40) + index) & mask
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        x = ((x ^ (x >> 30)) * factor) & mask
    return x ^ (x >> 31)
