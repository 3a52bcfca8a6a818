import dataclasses
import io
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import storage
from helpers.config import PreprocessingConfig
from helpers.encode import job
from helpers.raw import filters, inputs, readers


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


# ---- finding files


def test_a_file_that_went_away_is_not_called_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        readers.Parquet().row_groups(str(tmp_path / "a.parquet"))


# ---- the row filter, against an evaluation of our own, with three truth values as in SQL


@dataclasses.dataclass
class Expression:
    """A filter's text, and a function of a row that is True, False or None (unknown)."""

    text: str
    value: object


COMPARE = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
NUMBERS = st.integers(-3, 3) | st.sampled_from([-1.5, 0.5, 2.25])
TEXTS = st.sampled_from(["", "a", "b c", "it's", 'quo"te', "ü", "width"])


def compare(operator, left, right):
    unknown = any(value is None or value != value for value in (left, right))
    return None if unknown else COMPARE[operator](left, right)


def both(values):
    return False if False in values else None if None in values else True


@st.composite
def comparisons(draw):
    name = draw(st.sampled_from(["width", "score", "caption"]))
    operator, constant = draw(st.sampled_from(list(COMPARE))), draw(TEXTS if name == "caption" else NUMBERS)
    match draw(st.integers(0, 3)):
        case 0:
            return Expression(f"{name} {operator} {constant!r}", lambda row: compare(operator, row[name], constant))
        case 1:
            return Expression(f"{constant!r} {operator} {name}", lambda row: compare(operator, constant, row[name]))
        case 2 if name != "caption":
            other = "width" if name == "score" else "score"
            return Expression(f"{name}{operator}{other}", lambda row: compare(operator, row[name], row[other]))
    last = draw(TEXTS if name == "caption" else NUMBERS)
    return Expression(
        f"{constant!r} <= {name} {operator} {last!r}",
        lambda row: both([compare("<=", constant, row[name]), compare(operator, row[name], last)]),
    )


def joined(parts):
    def invert(part):
        return Expression(f"not ({part.text})", lambda row: None if part.value(row) is None else not part.value(row))

    def conjunction(pair):
        return Expression(
            f"({pair[0].text}) and ({pair[1].text})", lambda row: both([part.value(row) for part in pair])
        )

    def disjunction(pair):
        def value(row):
            values = [part.value(row) for part in pair]
            return True if True in values else None if None in values else False

        return Expression(f"({pair[0].text}) or ({pair[1].text})", value)

    pairs = st.tuples(parts, parts)
    return parts.map(invert) | pairs.map(conjunction) | pairs.map(disjunction)


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "width": st.none() | st.integers(-3, 3),
            "score": st.none() | st.sampled_from([-1.5, 0.0, 0.5, 2.25, math.inf, math.nan]),
            "caption": st.none() | TEXTS,
        }
    ),
    min_size=1,
    max_size=12,
)
TYPES = pa.schema([("width", pa.int64()), ("score", pa.float64()), ("caption", pa.string())])


@settings(max_examples=150, deadline=None)
@given(st.recursive(comparisons(), joined, max_leaves=6), ROWS)
def test_a_filter_keeps_the_rows_for_which_it_is_true(expression, rows):
    """Unknown is not true: a comparison with a missing value, or with NaN, drops the row, under `not` too.

    In memory, and in the read of a file, where the statistics of row groups count.
    """
    table = pa.Table.from_pylist(
        [{**row, "number": i} for i, row in enumerate(rows)], schema=TYPES.append(pa.field("number", pa.int64()))
    )
    expected, parsed = (
        [i for i, row in enumerate(rows) if expression.value(row) is True],
        filters.parse_filter(expression.text),
    )
    assert table.filter(parsed.to_pyarrow())["number"].to_pylist() == expected
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=3)
    assert pq.read_table(file, filters=parsed.to_pyarrow())["number"].to_pylist() == expected
    filters.check_filter(expression.text, TYPES)


def test_truth_values_can_be_compared():
    table = pa.table({"nsfw": [True, False, None]})
    for text, kept in (("nsfw == True", 1), ("nsfw != True", 1), ("not nsfw == False", 1), ("not nsfw != False", 1)):
        assert table.filter(filters.parse_filter(text).to_pyarrow()).num_rows == kept
        filters.check_filter(text, table.schema)


REFUSED = [
    "__import__('os').system('touch /tmp/owned') == 0",
    "width.__class__ == 1",
    "(lambda: 1)() > 0",
    "caption == f'{open(0)}'",
    "width[0] > 1",
    "[x for x in width] == 1",
    "width if width > 1 else width > 2",
    "(x := 3) > width",
    "width in (1, 2)",
    "width == None",
    "width ** 9 ** 9 > 1",
    "width > 1 & width < 3",
    "width",
    "not width",
    "3 < 4",
    "'a' < 3 < width",
    "True",
    "caption == b'x'",
    "width > -width",
    "width > 1, width > 2",
    "width > (width > 1)",
]
UNREADABLE = [
    "width >",
    "width = 3",
    "width > 1; import os",
    ")",
    "width > 1\0",
    "width == '\ud800'",
    "(" * 400 + "width > 1" + ")" * 400,
    "not " * 5000 + "width > 1",
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_comparison_is_refused_and_never_run(text):
    with pytest.raises(ValueError) as error:
        filters.parse_filter(text)
    message = str(error.value)
    assert message.startswith(f"row_filter={text!r}: ") and message.endswith(".")
    assert "is not a comparison of a column" in message or "is neither a column, a number nor a quoted text" in message


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_cannot_be_read_is_refused_with_an_example(text):
    for function in (filters.parse_filter, filters.filter_columns):
        with pytest.raises(ValueError, match="is not an expression such as 'width >= 256 and height >= 256'"):
            function(text)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="width <>=!()'\"and or not.,:+-*[]{}lmbdf_0123\\\n#", max_size=40))
def test_any_text_is_a_filter_or_one_sentence(text):
    try:
        found = filters.parse_filter(text)
    except ValueError as error:
        assert str(error).startswith(f"row_filter={text!r}") and str(error).endswith(".")
    else:
        assert found is not None or not text.strip()


@pytest.mark.parametrize(
    "text, columns",
    [
        ("width > 'a'", "width holds int64"),
        ("caption > 3", "caption holds string"),
        ("width == True", "width holds int64"),
        ("caption < score", "caption holds string, score holds double"),
        ("width == 100000000000000000000", "width holds int64"),
    ],
)
def test_comparing_a_number_with_a_text_is_refused(text, columns):
    with pytest.raises(ValueError) as error:
        filters.check_filter(text, TYPES)
    assert str(error.value).startswith(
        f"row_filter={text!r} compares values of different types ({columns}): change it."
    )


# ---- through Ray

COLUMNS = {"input_format": "parquet", "image_column": "jpg", "caption_column": "caption", "id_column": "hash"}


def test_tasks_read_each_row_group_once_and_a_file_without_any_too(tmp_path):
    """Spark and polars leave such files; a segment may hold nothing else."""
    table = pa.table({"hash": range(5000)})
    pq.ParquetWriter(tmp_path / "none.parquet", table.schema).close()
    pq.write_table(table, tmp_path / "many.parquet", row_group_size=500)
    assert readers.Parquet().parts(str(tmp_path / "none.parquet")) == [(0, [])]
    assert list(readers.Parquet().stream(str(tmp_path / "none.parquet"), ["hash"], [])) == []
    parts = readers.Parquet().parts(str(tmp_path / "many.parquet"))
    assert parts == [(0, [0, 1, 2, 3, 4]), (2500, [5, 6, 7, 8]), (4500, [9])]


def test_a_job_reads_only_what_is_used(tmp_path, cluster):
    """The limit is on the rows that are read, so that read = written + rejected + filtered whatever a filter drops."""
    paths, widths = [], [None, 1, 2, 3, 4] * 4
    for number in range(2):
        columns = {"hash": range(100 * number, 100 * number + 20), "width": widths, "unused": [0] * 20}
        paths.append(write(tmp_path / f"{number}.parquet", **columns, caption=["c"] * 20, jpg=[b"x"] * 20))
    text = "not width < 3 and hash != 7 or caption == 'none' and width > 100"
    config = PreprocessingConfig(row_filter=text, limit=30, **COLUMNS)
    segments = job.plan_segments(paths, config, rows_per_segment=20)
    assert [segment.rows for segment in segments] == [20, 10]
    for path, segment in zip(paths, segments, strict=True):
        rows, table = inputs.read_rows(segment, config).take_all(), pq.read_table(path)[: segment.rows]
        expected = table.filter(filters.parse_filter(text).to_pyarrow())["hash"].to_pylist()
        assert [row["id"] for row in rows] == expected and 0 < len(expected) < segment.rows
        assert {row["source"] for row in rows} == {storage.name(path)}
        assert set(rows[0]) == {"id", "caption", "image", "error", "source"}
