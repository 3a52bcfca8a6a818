import collections
import hashlib
import io
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFilter

from helpers.lesson import captioned_shapes


def contents(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_there_are_as_many_captions_as_the_module_says():
    assert [len(set(captioned_shapes.captions(n))) for n in (1, 2)] == [3024, 48384]
    assert [len(captioned_shapes.captions(n, "held_out")) for n in (1, 2)] == [295, 4887]
    assert "a large red circle in the top left on a blue background" in captioned_shapes.captions()


def test_every_caption_is_parsed_back_to_its_scene():
    for caption in captioned_shapes.captions(1) + captioned_shapes.captions(2)[::7]:
        assert captioned_shapes.parse(caption).caption == caption


@settings(max_examples=50, deadline=None)
@given(index=st.integers(0, 2**40), seed=st.integers(0, 2**31))
def test_the_same_index_gives_the_same_picture(index, seed):
    (picture, caption), (again, caption_again) = (captioned_shapes.draw_sample(index, seed, 0.5) for _ in range(2))
    assert caption == caption_again and picture.tobytes() == again.tobytes()
    assert (picture.mode, picture.size) == ("RGB", (64, 64))
    assert caption == captioned_shapes.scene(index, seed, 0.5).caption


def test_captions_do_not_change_between_releases():
    captions = [captioned_shapes.draw_sample(i)[1] for i in range(50)]
    assert captions[0] == "a small green circle at the bottom on a purple background"
    assert hashlib.sha256("".join(captions).encode()).hexdigest().startswith("044e4d88c214c877")


def test_other_indices_and_seeds_give_other_pictures():
    pictures = {captioned_shapes.draw_sample(index, seed)[0].tobytes() for index in range(50) for seed in range(2)}
    assert len(pictures) == 100


def test_training_never_sees_a_held_out_caption():
    train = {captioned_shapes.scene(i, two_object_share=0.3).caption for i in range(3000)}
    held_out = {captioned_shapes.scene(i, two_object_share=0.3, split="held_out").caption for i in range(200)}
    assert not any(map(captioned_shapes.is_held_out, train)) and all(map(captioned_shapes.is_held_out, held_out))
    assert any(captioned_shapes.is_held_out(captioned_shapes.scene(i, split="all").caption) for i in range(200))


def test_held_out_prompts_are_fixed_distinct_and_balanced():
    prompts = captioned_shapes.held_out_prompts(96)
    assert prompts == captioned_shapes.held_out_prompts(96) != captioned_shapes.held_out_prompts(96, seed=1)
    assert len(set(prompts)) == 96 and all(map(captioned_shapes.is_held_out, prompts))
    for key, expected in {"background": 12, "color": 12, "shape": 32, "size": 48, "position": 96 / 9}.items():
        counts = collections.Counter(captioned_shapes.attributes(prompt)[key] for prompt in prompts)
        assert max(abs(count - expected) for count in counts.values()) <= 1


@pytest.mark.parametrize("two_object_share", [0.0, 1.0])
def test_the_detector_reads_2000_of_2000_drawn_pictures(two_object_share):
    pictures, captions = zip(
        *(captioned_shapes.draw_sample(i, 5, two_object_share, "all") for i in range(2000)), strict=True
    )
    assert captioned_shapes.agreement(list(pictures), list(captions))["all"] == 1.0


def test_the_detector_does_not_credit_the_wrong_caption():
    pictures, captions = zip(*(captioned_shapes.draw_sample(i, split="all") for i in range(300)), strict=True)
    scores = captioned_shapes.agreement(list(pictures), list(captions[1:] + captions[:1]))
    assert scores["all"] <= 0.01 and scores["color"] < 0.25 and scores["position"] < 0.25


def noisy(picture):
    noise = np.random.default_rng(0).normal(0, 10, (64, 64, 3))
    return Image.fromarray(np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8))


def as_jpeg(picture):
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=75)
    return Image.open(data)


@pytest.mark.parametrize(
    "degrade",
    [
        noisy,
        as_jpeg,
        lambda p: p.filter(ImageFilter.GaussianBlur(1)),
        lambda p: p.reduce(2),
        lambda p: p.resize((100, 100), Image.Resampling.BICUBIC),
        lambda p: p.resize((256, 256)),
    ],
    ids=["noise", "jpeg", "blur", "32x32", "100x100", "256x256"],
)
def test_the_detector_reads_degraded_pictures(degrade):
    pictures, captions = zip(*(captioned_shapes.draw_sample(i, 5, 0.5, "all") for i in range(200)), strict=True)
    assert captioned_shapes.agreement([degrade(p) for p in pictures], list(captions))["all"] >= 0.97


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    kind=st.sampled_from(["noise", "blobs", "flat"]),
)
@pytest.mark.filterwarnings("error")
def test_the_detector_answers_for_any_picture(seed, height, width, kind):
    rng = np.random.default_rng(seed)
    small = {"noise": (height, width), "blobs": (5, 5), "flat": (1, 1)}[kind]
    picture = Image.fromarray(rng.integers(0, 256, (*small, 3), dtype=np.uint8)).resize((width, height))
    found = captioned_shapes.detect(np.asarray(picture))
    assert found["background"] in captioned_shapes.COLORS and found["count"] in (0, 1, 2, 3)


def test_wrong_attributes_are_named_with_what_was_expected():
    caption = "a small red square in the top left on a white background"
    picture = captioned_shapes.draw_scene(captioned_shapes.parse(caption), 0)
    assert captioned_shapes.wrong_attributes(picture, caption) == {}
    assert captioned_shapes.wrong_attributes(np.asarray(picture), caption.replace("red square", "blue circle")) == {
        "color": ("red", "blue"),
        "shape": ("square", "circle"),
    }
    two = "a small red square left of a large white circle on a blue background"
    wrong = captioned_shapes.wrong_attributes(picture, two)
    assert wrong["count"] == (1, 2) and wrong["shape_2"] == (None, "circle")


def test_shape_overlap_of_drawn_pictures_is_near_one():
    pictures, captions = zip(*(captioned_shapes.draw_sample(i, 7, 0.2, "held_out") for i in range(40)), strict=True)
    overlaps = [captioned_shapes.shape_overlap(*pair) for pair in zip(pictures, captions, strict=True)]
    assert 0.96 < np.mean(overlaps) < 0.975 and min(overlaps) > 0.9 and max(overlaps) <= 1


def test_shape_overlap_falls_with_the_shape_and_ignores_its_size():
    caption = "a large red circle in the center on a white background"

    def overlap(draw):
        picture = Image.new("RGB", (256, 256), captioned_shapes.COLORS["white"])
        draw(ImageDraw.Draw(picture), captioned_shapes.COLORS["red"])
        return captioned_shapes.shape_overlap(picture, caption)

    circles = [overlap(lambda pen, c, r=r: pen.ellipse((128 - r, 128 - r, 128 + r, 128 + r), c)) for r in (25, 35, 55)]
    lump = overlap(lambda pen, c: pen.polygon([(60, 130), (110, 90), (150, 70), (200, 150), (120, 180), (130, 130)], c))
    assert min(circles) > 0.95 and lump < 0.8
    assert np.isnan(overlap(lambda pen, c: None))
    assert overlap(lambda pen, c: pen.rectangle((90, 90, 160, 160), captioned_shapes.COLORS["blue"])) > 0.93


def test_right_of_and_left_of_read_the_same():
    one, other = (
        captioned_shapes.attributes(f"a small red circle {a} a large blue square on a white background")
        for a in ("right of", "left of")
    )
    assert (one["color"], one["color_2"], one["relation"]) == ("blue", "red", "left of")
    assert (other["color"], other["color_2"], other["relation"]) == ("red", "blue", "left of")


def test_the_parquet_is_laion_like_and_decodes(tmp_path):
    assert captioned_shapes.write_data_set(tmp_path, 50, rows_per_file=20) == str(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"shapes-0000{i}.parquet" for i in range(3)]
    table = pq.read_table(tmp_path)
    assert table.schema.remove_metadata() == pa.schema(
        {"hash": pa.int64(), "caption": pa.string(), "width": pa.float64(), "height": pa.float64(), "jpg": pa.binary()}
    )
    rows = table.to_pylist()
    pictures = [Image.open(io.BytesIO(row["jpg"])) for row in rows]
    assert [p.format for p in pictures[:4]] == ["JPEG", "JPEG", "JPEG", "PNG"]
    assert [(row["width"], row["height"]) for row in rows] == [p.size for p in pictures]
    assert {p.size for p in pictures} == {(64, 64), (96, 64), (64, 96)}  # the centre square is the drawn picture
    assert captioned_shapes.agreement(pictures, [row["caption"] for row in rows])["all"] == 1.0
    assert [row["caption"] for row in rows] == [captioned_shapes.draw_sample(i)[1] for i in range(50)]


def test_damaged_rows_are_as_many_as_asked_for(tmp_path):
    captioned_shapes.write_data_set(tmp_path, 70, spoilt_share=0.2)
    rows = pq.read_table(tmp_path).to_pylist()

    def is_whole(row):
        try:
            picture = Image.open(io.BytesIO(row["jpg"] or b""))
            picture.load()
        except OSError:
            return False
        return picture.size == (row["width"], row["height"]) and bool((row["caption"] or "").strip())

    assert sum(not is_whole(row) for row in rows) == 14
    assert {None, "  "} < {row["caption"] for row in rows} and {None, b""} < {row["jpg"] for row in rows}


def test_the_data_set_needs_neither_torch_nor_ray():
    code = "import sys, helpers.lesson.captioned_shapes as shapes; shapes.detect(shapes.draw_sample(0)[0])"
    code += "; print({'torch', 'ray'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_drawbench_prompts_use_known_words_in_new_captions():
    prompts = [prompt for of_category in captioned_shapes.DRAWBENCH.values() for prompt in of_category]
    known = {
        word for text in [*captioned_shapes.captions(1)[::7], *captioned_shapes.RELATIONS] for word in text.split()
    }
    assert len(set(prompts)) == len(prompts) == 16
    assert {word for prompt in prompts for word in prompt.split()} <= known
    assert all(captioned_shapes.is_held_out(prompt) for prompt in prompts if captioned_shapes.is_caption(prompt))
    assert [any(map(captioned_shapes.is_caption, of)) for of in captioned_shapes.DRAWBENCH.values()] == [1, 1, 0, 0]


def test_the_detector_counts_unexpected_objects():
    caption = "a small red square in the top left on a white background"
    picture = captioned_shapes.draw_scene(captioned_shapes.parse(caption), 0)
    for number, colour in ((2, "red"), (2, "blue"), (3, "green")):
        if number == 3:
            picture.paste(captioned_shapes.COLORS["blue"], (10, 40, 24, 54))
        found = picture.copy()
        found.paste(captioned_shapes.COLORS[colour], (40, 40, 54, 54))
        assert captioned_shapes.detect(found)["count"] == number
    empty = captioned_shapes.detect(np.full((64, 64, 3), 245, np.uint8))
    assert (empty["background"], empty["count"], empty["shape"]) == ("white", 0, None)


@pytest.mark.parametrize("change", [{"num_rows": 8}, {"seed": 1}, {}])
def test_another_call_or_a_missing_file_ends_with_the_same_bytes(tmp_path, change):
    arguments = {"num_rows": 30, "rows_per_file": 10}
    captioned_shapes.write_data_set(tmp_path / "a", **arguments)
    (tmp_path / "a" / "shapes-00001.parquet").unlink()
    for folder in "ab":
        captioned_shapes.write_data_set(tmp_path / folder, **(arguments | change))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda _: captioned_shapes.parse("a cat"), "'a cat' is not a caption"),
        (lambda _: captioned_shapes.parse("a large red circle at the top on a red background"), "one colour twice"),
        (lambda _: captioned_shapes.scene(0, split="test"), "split is 'test'"),
        (lambda _: captioned_shapes.scene(0, two_object_share=1.5), "two_object_share is 1.5"),
        (lambda _: captioned_shapes.detect(np.zeros((64, 64, 3), np.float32)), "uint8"),
        (lambda _: captioned_shapes.agreement([Image.new("RGB", (64, 64))], []), "1 pictures and 0 prompts"),
        (lambda _: captioned_shapes.held_out_prompts(296), "there are 295"),
        (lambda folder: captioned_shapes.write_data_set(folder, 0), "num_rows=0"),
        (lambda folder: captioned_shapes.write_data_set(folder, 10), "mine.parquet was not written by"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path, call, said):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "mine.parquet")
    with pytest.raises(ValueError, match=said):
        call(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.parquet"]
