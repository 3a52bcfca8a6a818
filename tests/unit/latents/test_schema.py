import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers.latents import schema


def bits(array):
    return np.ascontiguousarray(array).view(np.uint16)


@st.composite
def tensors(draw):
    """Any fp16 bits, NaN and infinities too, and which rows there are."""
    rows, shape = draw(st.integers(1, 9)), tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    values = draw(hnp.arrays(np.uint16, (rows, *shape))).view(np.float16)
    return values, draw(st.none() | hnp.arrays(np.bool_, rows))


@settings(max_examples=60, deadline=None)
@given(tensors(), st.integers(0, 8), st.integers(0, 9))
def test_tensors_come_back_bit_by_bit_from_slices_too(tensor, start, length):
    values, valid = tensor
    column = schema.to_binary(values, valid)
    assert column.type == pa.binary(values[0].nbytes) and column.null_count == (0 if valid is None else (~valid).sum())
    found, present = schema.from_binary(column.slice(start, length), values.shape[1:])
    expected = np.ones(len(values), dtype=bool) if valid is None else valid
    assert found.dtype == np.float16 and np.array_equal(present, expected[start : start + length])
    assert np.array_equal(bits(found[present]), bits(values[start : start + length][present]))


@settings(max_examples=20, deadline=None)
@given(tensors(), st.integers(1, 4))
def test_tensors_come_back_bit_by_bit_from_parquet_and_from_chunks(tensor, rows_per_group):
    values, valid = tensor
    stream = io.BytesIO()
    pq.write_table(pa.table({"x": schema.to_binary(values, valid)}), stream, row_group_size=rows_per_group)
    file = pq.ParquetFile(stream)
    column = pa.concat_tables([file.read_row_group(i) for i in range(file.num_row_groups)])["x"]
    found, present = schema.from_binary(column, values.shape[1:])
    assert np.array_equal(present, np.ones(len(values), dtype=bool) if valid is None else valid)
    assert np.array_equal(bits(found[present]), bits(values[present]))


def test_reading_a_column_copies_nothing():
    column = schema.to_binary(np.ones((4, 3)))
    found, _ = schema.from_binary(column, (3,))
    assert found.__array_interface__["data"][0] == column.buffers()[1].address


@pytest.mark.parametrize(
    "column", [pa.array([], pa.binary(4)), pa.chunked_array([], pa.binary(4)), pa.nulls(3, pa.binary(4))]
)
def test_columns_without_a_value_are_read_too(column):
    found, present = schema.from_binary(column, (2,))
    assert found.shape == (len(column), 2) and not present.any()


# ---- held-out rows


@pytest.mark.parametrize(
    "ids", [range(20_000), [f"id-{i}" for i in range(20_000)], [i * 2**40 - 2**62 for i in range(20_000)]]
)
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_the_held_out_share_is_what_was_asked_for(ids, share):
    mask = schema.held_out_mask(ids, share)
    assert mask.dtype == bool and abs(mask.mean() - share) < 4 * np.sqrt(share * (1 - share) / len(ids))


def test_no_share_holds_nothing_out_and_a_larger_one_keeps_what_a_smaller_one_held():
    ids = list(range(5000))
    assert not schema.held_out_mask(ids, 0).any()
    small, large = schema.held_out_mask(ids, 0.05), schema.held_out_mask(ids, 0.2)
    assert (small <= large).all() and small.sum() < large.sum()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8), max_size=30), st.randoms(), st.floats(0, 0.99))
def test_a_row_is_held_out_whatever_stands_around_it(ids, random, share):
    side = dict(zip(map(str, ids), schema.held_out_mask(ids, share), strict=True))
    shuffled = random.sample(ids, len(ids))
    assert [side[str(i)] for i in shuffled] == schema.held_out_mask(shuffled, share).tolist()
    assert all(schema.held_out_mask([i], share)[0] == side[str(i)] for i in ids)


def test_numbers_are_held_out_as_their_text_is():
    """Ids are int64 in one file and text in another."""
    numbers = np.arange(500)
    assert np.array_equal(schema.held_out_mask(numbers, 0.3), schema.held_out_mask([str(i) for i in numbers], 0.3))
