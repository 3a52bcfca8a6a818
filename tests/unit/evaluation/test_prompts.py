"""Prompts from lists and files, good and bad."""

import pytest

from helpers.encode import captions
from helpers.production.extras.prompts import read_prompts

TWO = ["a red circle", "a blue square, small"]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.txt", "a red circle\r\n\n  a blue square, small "),
        ("p.txt", "\ufeffa red circle\na blue square, small\n"),
        ("p.csv", 'Prompts,Category\na red circle,Colors\n"a blue square, small",Counting\n'),
        ("p.tsv", "id\ttext\n0\ta red circle\n1\ta blue square, small\n"),
        ("p.csv", 'anything\na red circle\n"a blue square, small"\n'),
    ],
)
def test_prompts_of_every_format_are_the_same(tmp_path, name, content):
    assert read_prompts(write(tmp_path / name, content)) == TWO


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.txt", "\n \n", "holds no prompt: give at least one"),
        ("p.csv", "", "holds no prompt"),
        ("p.csv", "prompt\n", "holds no prompt"),
        ("p.txt", b"good\n\xff\xfe bad\n", "line 2 is not UTF-8: save the file as UTF-8"),
        ("p.csv", "prompt,n\ngood,1\n,2\n", "line 3 is empty: write a prompt"),
        ("p.csv", "a,b\n1,2\n", "has the columns a, b: name the prompts' one 'prompt'"),
        ("p.json", "x", "is not a .txt, .csv, .tsv file"),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path, name, content, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_prompts(write(tmp_path / name, content))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist: give a file of prompts"):
        read_prompts(str(tmp_path / "absent.txt"))


def test_prompts_longer_than_the_text_encoder_reads_are_refused(tmp_path):
    tokenizer = captions.load_tokenizer("tiny-sd")
    path = write(tmp_path / "p.txt", "a red circle\n\n" + "a red circle " * 10 + "\n")
    assert len(read_prompts(path)) == 2
    with pytest.raises(ValueError, match="line 3 has 32 tokens; the text encoder reads 24.*1 of 2 prompts are longer"):
        read_prompts(path, tokenizer=tokenizer)


def test_duplicates_are_kept_and_said(capsys):
    assert read_prompts(["a", "b", "a "]) == ["a", "b", "a"]
    assert "prompts repeats 1 prompt(s): each is used" in capsys.readouterr().out
    assert read_prompts(["a", "b"]) and capsys.readouterr().out == ""


def test_a_list_may_hold_texts_alone():
    with pytest.raises(ValueError, match="prompts, line 2: 3 is not text"):
        read_prompts(["good", 3])
