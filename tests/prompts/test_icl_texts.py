"""Texts from CSV files, and what is refused."""

import gzip
from pathlib import Path

import pytest

from fedpriv.core.errors import InputError
from fedpriv.data.datasets import list_datasets
from fedpriv.prompts.settings import TextConfig
from fedpriv.prompts.texts import load_texts

ROWS = "text,label,split\n" + "".join(f"t{n},{'ab'[n % 2]},{'train' if n < 6 else 'test'}\n" for n in range(10))


def own(folder: Path, content: str, **settings: object) -> TextConfig:
    path = folder / "own.csv"
    path.write_text(content, encoding="utf-8")
    return TextConfig.model_validate({"name": "csv", "path": str(path), **settings})


def test_a_split_is_kept(tmp_path: Path) -> None:
    texts = load_texts(own(tmp_path, ROWS), 0)
    assert [example.text for example in texts.examples] == [f"t{n}" for n in range(6)]
    assert [question.label for question in texts.questions] == [0, 1, 0, 1]
    assert texts.labels == ("a", "b")
    assert load_texts(own(tmp_path, ROWS, labels=("bad", "good")), 0).labels == ("bad", "good")
    assert len(load_texts(own(tmp_path, ROWS, examples=3), 0).examples) == 3
    assert load_texts(own(tmp_path, f"\ufeff{ROWS}"), 0) == texts  # with a byte-order mark, as Excel writes it


def test_without_a_split_a_fifth_is_asked(tmp_path: Path) -> None:
    rows = "text,label\n" + "".join(f"t{n},{'ab'[n % 2]}\n" for n in range(50))
    texts = load_texts(own(tmp_path, rows), 0)
    assert (len(texts.examples), len(texts.questions)) == (40, 10)
    assert load_texts(own(tmp_path, rows), 1).questions != texts.questions


def test_a_known_file(tmp_path: Path) -> None:
    (status,) = [status for status in list_datasets(str(tmp_path)) if status.name == "sst2"]
    assert not status.available
    with gzip.open(tmp_path / "sst2.csv.gz", "wt", encoding="utf-8") as file:
        file.write("split,label,sentence\ntrain,0,bad\ntest,1,good\ndev,1,left out\n")
    texts = load_texts(TextConfig(name="sst2", root=str(tmp_path)), 0)
    assert (texts.labels, texts.text_word) == (("negative", "positive"), "Review")
    assert (len(texts.examples), len(texts.questions)) == (1, 1)
    (status,) = [status for status in list_datasets(str(tmp_path)) if status.name == "sst2"]
    assert (status.available, status.examples) == (True, 2)


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        (ROWS, {"label": "lable"}, r"there is no column 'lable'; did you mean label"),
        (ROWS, {"text": "body"}, r"there is no column 'body'"),
        (ROWS + "x,,train\n", {}, r"line 12: the cell of 'label' is empty"),
        (ROWS + "x\n", {}, r"line 12: the cell of 'label' is empty"),
        (ROWS, {"labels": ("one",)}, r"data.labels has 1 entries"),
        (ROWS, {"examples": 7}, r"data.examples = 7: .* has 6 private examples"),
        ("text,label\na,x\nb,x\n", {}, r"at least two labels"),
        ("text,label,split\na,x,train\nb,y,train\n", {}, r"2 private examples and 0 questions"),
        ('text,label\n"a,x\n', {}, r"cannot be read as CSV in UTF-8"),
        (ROWS + "x,a,dev\n", {}, r"row 11: split = 'dev': allowed: train and test"),
        (ROWS + "x,a,Train\n", {}, r"row 11: split = 'Train':"),
        (ROWS + "x,a\n", {}, r"row 11: split = '':"),
        (ROWS + "x,a,test,more\n", {}, r"line 12: the row has more cells than there are columns"),
        ("text,label,text\na,x,b\n", {}, r"two columns have the name 'text'"),
        ("split,text,label,split\ntrain,a,x,test\n", {}, r"two columns have the name 'split'"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path: Path, content: str, settings: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        load_texts(own(tmp_path, content, **settings), 0)
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sms_spam.csv.gz is not there, .* columns text, label \(ham, spam\);"):
        load_texts(TextConfig(root=str(tmp_path)), 0)
    (tmp_path / "sms_spam.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(InputError, match=r"cannot be read"):
        load_texts(TextConfig(root=str(tmp_path)), 0)
    with gzip.open(tmp_path / "agnews.csv.gz", "wt", encoding="utf-8") as file:
        file.write("split,label,text\ntrain,7,x\n")
    with pytest.raises(InputError, match=r"the label '7' is not known; allowed: 0, 1, 2, 3"):
        load_texts(TextConfig(name="agnews", root=str(tmp_path)), 0)
