import hashlib
import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.lesson import captioned_shapes


def contents(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


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


@pytest.mark.parametrize("two_object_share", [0.0, 1.0])
def test_the_detector_reads_2000_of_2000_drawn_pictures(two_object_share):
    pictures, captions = zip(
        *(captioned_shapes.draw_sample(i, 5, two_object_share, "all") for i in range(2000)), strict=True
    )
    assert captioned_shapes.agreement(list(pictures), list(captions))["all"] == 1.0


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
