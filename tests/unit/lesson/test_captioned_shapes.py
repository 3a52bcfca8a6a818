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
from PIL import Image, ImageFilter

from helpers.lesson import captioned_shapes


def contents(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


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


@pytest.mark.parametrize(
    "degrade", [lambda p: p.filter(ImageFilter.GaussianBlur(1)), lambda p: p.reduce(2), lambda p: p.resize((256, 256))]
)
def test_the_detector_reads_degraded_pictures(degrade):
    pictures, captions = zip(*(captioned_shapes.draw_sample(i, 5, 0.5, "all") for i in range(200)), strict=True)
    assert captioned_shapes.agreement([degrade(p) for p in pictures], list(captions))["all"] >= 0.97


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), height=st.integers(1, 90), width=st.integers(1, 90))
def test_the_detector_answers_for_any_picture(seed, height, width):
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found = captioned_shapes.detect(noise)
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
        (lambda _: captioned_shapes.held_out_prompts(296), "there are 295"),
        (lambda folder: captioned_shapes.write_data_set(folder, 10), "mine.parquet was not written by"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path, call, said):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "mine.parquet")
    with pytest.raises(ValueError, match=said):
        call(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.parquet"]
