"""Texts as data sets: files, tokenizers, sequences, and whose they are."""

import gzip
import json
import os
import re
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from fedpriv.core.config import DataConfig
from fedpriv.core.config.error_text import validated
from fedpriv.core.errors import InputError
from fedpriv.core.names import END, PAD, START
from fedpriv.data.datasets import load_dataset
from fedpriv.data.partition import partition_indices
from fedpriv.data.tokenizers import NO_TARGET, Bytes, LlamaTokens, Pairs, TextFacts, Words, next_tokens
from tests.cases import in_one_test

ROOT = Path(os.environ.get("FEDPRIV_DATA", "data"))
ROWS = "who,what,verdict\nann,Go home,no\nbob,Stay,yes\nann,Why?,no\nann,I am,yes\nbob,Well,no\n"


def config(path: Path, **text: object) -> DataConfig:
    columns = {"text": "what", "test_share": 0.4}
    return validated(DataConfig, {"name": "text", "path": str(path), "key": "who", "text": columns | text}, "a test")


def own(folder: Path, content: str = ROWS, name: str = "own.csv") -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", ["To be, or not to be.", "naïve – 三", "a  b\n\nc"])
def test_bytes_come_back(text: str) -> None:
    tokenizer = Bytes()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode([START, *tokens, END, PAD]) == text
    assert min(tokens) > END
    assert max(tokens) < tokenizer.size


def test_words_are_public() -> None:
    tokenizer = Words(["the", "cat", "sat"], 46)
    assert tokenizer.size == 46  # three with a meaning, the unknown one, 10 digits and 32 marks: no room for a word
    tokenizer = Words(["the", "cat", "sat"], 49)
    assert tokenizer.decode(tokenizer.encode("The CAT, sat 7!")) == "the cat , sat 7 !"
    assert tokenizer.encode("dog") == [END + 1]


@pytest.mark.skipif(not (ROOT / "stories260k.npz").is_file(), reason="stories260k.npz is not in the data folder")
def test_the_llamas_tokens_are_merged_as_in_llama2c() -> None:
    """The oracle: the best pair of the whole text is merged first, spaces or not."""
    tokenizer = LlamaTokens.read(ROOT / "stories260k.npz")
    assert all(b" " not in token[1:] for token in tokenizer.vocabulary)
    text = 'Once upon a time,  there was a little girl.\nShe said: "ümit"'
    found = [n if (n := tokenizer.number(c.encode())) is not None and n > END else 0 for c in f" {text}"]
    raw = [c.encode() for c in f" {text}"]
    expected = [[number] if number else [3 + byte for byte in one] for number, one in zip(found, raw, strict=True)]
    whole = [number for part in expected for number in part]
    while True:
        both = [tokenizer.number(tokenizer.raw(one) + tokenizer.raw(next_)) for one, next_ in pairwise(whole)]
        pairs = [(tokenizer._scores[n], -place, n) for place, n in enumerate(both) if n is not None]
        if not pairs:
            break
        _, place, number = max(pairs)
        whole[-place : 2 - place] = [number]
    assert tokenizer.encode(text) == whole
    assert tokenizer.decode(whole) == text


def test_pairs_of_bytes_are_learnt_from_public_texts() -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (fedpriv[text])")
    tokenizer = Pairs(["the cat sat on the mat"] * 5, 300)
    assert tokenizer.size <= 300
    assert tokenizer.decode([START, *tokenizer.encode("the mat, naïve"), END]) == "the mat, naïve"
    assert len(tokenizer.encode("the cat")) < len("the cat")


def test_sequences_predict_each_token_once() -> None:
    """Packed, the targets of one owner are its whole stream but for the first token; padded, of each text."""
    texts, owners = ["abc", "de", "fghij", "k"], [0, 1, 0, 1]
    stream: dict[int, list[int]] = {0: [], 1: []}
    for text, owner in zip(texts, owners, strict=True):
        stream[owner] += [START, *Bytes().encode(text), END]
    x, y, whose = next_tokens(TextFacts("next", Bytes(), packed=True), texts, owners, 4)
    for owner in (0, 1):
        assert x[whose == owner][:, 0].tolist() == stream[owner][:-1:4]
        assert y[(whose == owner)[:, None] & (y != NO_TARGET)].tolist() == stream[owner][1:]
    x, y, whose = next_tokens(TextFacts("next", Bytes()), texts, owners, 4)
    assert whose.tolist() == owners
    assert x[3].tolist() == [START, *Bytes().encode("k"), END, PAD]
    assert y[3].tolist() == [*Bytes().encode("k"), END, NO_TARGET, NO_TARGET]
    assert y[2].tolist() == Bytes().encode("fghi")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "gz", "tsv", "json"])
def test_own_files(tmp_path: Path, kind: str) -> None:
    path = own(tmp_path)
    if kind == "jsonl":
        rows = [line.split(",") for line in ROWS.splitlines()]
        path = own(tmp_path, "\n".join(json.dumps(dict(zip(rows[0], row, strict=True))) for row in rows[1:]), "o.jsonl")
    if kind == "json":
        cells = [line.split(",") for line in ROWS.splitlines()]
        entries = [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]
        path = own(tmp_path, json.dumps(entries), "own.json")
    if kind == "tsv":
        path = own(tmp_path, ROWS.replace(",", "\t"), "own.tsv")
    if kind == "gz":
        path = tmp_path / "own.csv.gz"
        path.write_bytes(gzip.compress(ROWS.encode()))
    dataset = load_dataset(config(path, label="verdict", length=8), 0)
    assert dataset.text is not None
    assert dataset.class_names == ("no", "yes")
    assert dataset.keys is not None and dataset.keys.names == ("ann", "bob")
    unlabelled = load_dataset(config(path, length=8), 0)
    assert dataset.left_out == ""
    assert unlabelled.left_out == "not read: verdict; data.text.label = 'COLUMN' would classify"
    assert [dataset.text.tokenizer.decode(row.flatten().tolist()) for row in dataset.x_train] == [
        "Go home",
        "Stay",
        "Why?",
    ]
    assert dataset.y_train.tolist() == [0, 1, 0]
    assert dataset.y_test.tolist() == [1, 0]  # the last ones of each key
    shares = partition_indices(dataset.y_train.numpy(), config(path).model_copy(update={"partition": "key"}), 2, 0,
                               dataset.keys.train)  # fmt: skip
    assert [share.tolist() for share in shares] == [[0, 2], [1]]


def test_the_next_token_of_own_texts(tmp_path: Path) -> None:
    dataset = load_dataset(config(own(tmp_path), length=4, pack=True), 0)
    assert dataset.is_next
    assert dataset.notes  # a text lies in several sequences
    assert dataset.x_train.shape[1:] == (1, 1, 4)
    assert torch.equal(dataset.normalise(dataset.x_train)[0, 1:], dataset.y_train[0, :-1])


def test_the_loss_counts_responses_alone(tmp_path: Path) -> None:
    """Of prompts and texts, with the mark between them; a text that is cut before its response has no target."""
    rows = [["ann", "a#b", "c"], ["ann", "de", "f##g"], ["ann", "abcdefghij", "k"], ["ann", "h", "i"]]
    content = "\n".join(json.dumps(dict(zip(("who", "ask", "what"), row, strict=True))) for row in rows)
    about: dict[str, object] = {"prompt": "ask", "response": "##", "length": 8, "test_share": 0.25}
    dataset = load_dataset(config(own(tmp_path, content, "own.jsonl"), **about), 0)
    x, y = dataset.x_train.flatten(1).tolist(), dataset.y_train.tolist()
    learnt = [[token for token in row if token != NO_TARGET] for row in y]
    assert learnt == [[*Bytes().encode("c"), END], [*Bytes().encode("f##g")], []]
    for tokens, targets, (_, prompt, text) in zip(x, y, rows, strict=False):
        whole = [START, *Bytes().encode(f"{prompt}##{text}"), END]
        assert tokens == [*whole, *[PAD] * 8][:8]
        first = 1 + len(prompt) + 2
        assert targets == [*[NO_TARGET] * (first - 1), *whole[first:], *[NO_TARGET] * 8][:8]
    assert dataset.warnings == ("Texts without a response within data.text.length: 1.",)
    with pytest.raises(InputError, match=r"data\.text\.length = 4: no train text has a response within so many tokens"):
        load_dataset(config(own(tmp_path, content, "own.jsonl"), **about | {"length": 4}), 0)


@pytest.mark.parametrize(
    ("content", "text", "words"),
    [
        (ROWS, {"prompt": "verdict"}, "prompt = 'verdict': response says what stands between it and the text"),
        (ROWS, {"prompt": "verdict", "response": "e"}, "2 cells of the prompt have data.text.response = 'e' in them"),
        (ROWS, {"response": "W"}, "3 of 5 texts lack data.text.response = 'W'"),
        (ROWS, {"response": "o", "pack": True}, "is for next tokens of texts that are not packed; pack = true"),
        (ROWS, {"text": "waht"}, "there is no column 'waht'; did you mean what"),
        (ROWS, {"label": "mark"}, "there is no column 'mark'"),
        (ROWS + "cid,,no\n", {}, "line 7: the cell of 'what' is empty"),
        (ROWS + "cid,  ,no\n", {}, "line 7: the cell of 'what' is empty"),
        (ROWS, {"task": "classify"}, "the texts have no labels"),
        (ROWS, {"label": "verdict", "pack": True}, "pack = true lays texts end to end"),
        (ROWS, {"tokenizer": "bpe", "vocabulary": 258}, "'bpe' has 259 tokens before it merges; vocabulary = 258"),
        ("what,who\n", {}, "there is no text in it"),
        (ROWS, {"test_share": 0.01}, "5 training and 0 test texts"),
        ("", {}, "there is no column 'what'; there are none"),
        (ROWS + "cid,hm,NA\n", {"label": "verdict"}, "the label 'NA' says that there is none"),
        (
            "who,what,verdict\n" + "".join(f"ann,text {number},{number / 7}\n" for number in range(40)),
            {"label": "verdict"},
            r"the labels are numbers with many values \(40\)",
        ),
        (
            "who,what,verdict\n"
            + "".join(f"ann,text {number},case {number // 2}\n" for number in range(60))
            + "".join(f"ann,text,own {number}\n" for number in range(15)),
            {"label": "verdict"},
            "the labels have 45 values in 75 texts; fedpriv classifies",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path: Path, content: str, text: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        load_dataset(config(own(tmp_path, content), **text), 0)
    assert "\n" not in str(raised.value)


@in_one_test(
    ("line", "words"),
    [
        ("[1]", "expected a JSON object"),
        ("{", "line 1: not JSON"),
        (f'{{"what": "a", "who": {"[" * 100_000}', "line 1: not JSON that can be read: maximum recursion depth"),
        (r'{"what": "a\ud83d", "who": "b"}', "line 1: 'what' holds half of a pair of characters"),
        (r'{"what": "a", "who": "\ud83d"}', "line 1: 'who' holds half of a pair of characters"),
        ('{"what": ["a"], "who": "b"}', "line 1: 'what': message 1: expected a role and a text"),
        ('{"what": "a", "who": ["b"]}', "line 1: 'who' holds a list; expected a text or a number"),
        ('{"what": "a", "who": {}}', "line 1: 'who' holds an object; expected a text or a number"),
        ('{"what": "a", "who": NaN}', "line 1: not JSON that can be read: NaN is no number"),
        ('{"what": "a", "who": -1e400}', "line 1: 'who' holds too large a number; expected a text or a number"),
        (
            '{"what": "a", "who": "b", "split": "train"}\n{"what": "a", "who": "b"}',
            "row 2: it has no split, and other rows have one",
        ),
    ],
)
def test_json_lines_that_are_none(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_dataset(config(own(tmp_path, line, "own.jsonl")), 0)


def test_a_vocabulary_file_neither_pads_nor_cuts(tmp_path: Path) -> None:
    library = library_of({"<none>": 0, "go": 1, "home": 2})
    library.enable_padding(length=9, pad_id=7)
    library.enable_truncation(1)
    library.save(str(tmp_path / "own.json"))
    assert Pairs([], 16, str(tmp_path / "own.json")).encode("go home go") == [END + 2, END + 3, END + 2]


def test_vocabulary_files_that_do_not_fit(tmp_path: Path) -> None:
    path = str(tmp_path / "own.json")
    for vocabulary, found in (({}, "it has no tokens"), ({"<none>": 0, "go": 9}, "it has 2 from 0 to 9")):
        library_of(vocabulary).save(path)
        with pytest.raises(InputError, match=f"with the numbers 0, 1, 2 and so on; {found}"):
            Pairs([], 16, path)
    library_of({"go": 0}).save(path)
    with pytest.raises(InputError, match=r"a text cannot be encoded: .*Missing"):
        Pairs([], 16, path).encode("stay")
    lines = tmp_path / "vocab.txt"  # as BERT's
    lines.write_text("[PAD]\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"expected is a tokenizer\.json of the library tokenizers$"):
        Pairs([], 16, str(lines))


def library_of(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<none>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("cola", (8551, 1043)),
        ("rotten_tomatoes", (8530, 1066)),
        ("sms_spam", (4654, 517)),
        ("agnews", (5000, 7600)),
    ],
)
def test_known_files(name: str, sizes: tuple[int, int]) -> None:
    """The numbers of the README of the data; 5,171 messages are distinct, of which a tenth are tests."""
    if not (ROOT / f"{name}.csv.gz").is_file():
        pytest.skip(f"{name} is not in the data folder")
    dataset = load_dataset(validated(DataConfig, {"name": name, "text": {"length": 8}}, "a test"), 0)
    assert (len(dataset.y_train), len(dataset.y_test)) == sizes


@pytest.mark.parametrize("name", ["cola", "rotten_tomatoes", "sms_spam", "agnews", "sst2"])
def test_a_file_made_as_the_refusal_says_is_read(tmp_path: Path, name: str) -> None:
    settings = validated(DataConfig, {"name": name, "root": str(tmp_path), "text": {"length": 8}}, "a test")
    with pytest.raises(InputError, match=r"is not there, and is not downloaded: .*columns ") as raised:
        load_dataset(settings, 0)
    columns = dict(re.findall(r"(\w+)(?: \(([^)]*)\))?(?:, |$)", str(raised.value).partition("columns ")[2]))
    values = {column: given.split(", ") for column, given in columns.items() if given}
    texts = [column for column in columns if column not in values]
    rows = list(product(*values.values())) * 10
    lines = [",".join([*texts, *values]), *(f"text {number},{','.join(row)}" for number, row in enumerate(rows))]
    (tmp_path / f"{name}.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    dataset = load_dataset(settings, 0)
    assert len(texts) == 1
    assert dataset.classes == len(next(given for column, given in values.items() if column != "split"))
    assert len(dataset.y_train) + len(dataset.y_test) == len(rows)


@pytest.mark.skipif(not (ROOT / "shakespeare.json.gz").is_file(), reason="shakespeare is not in the data folder")
def test_speakers_of_shakespeare() -> None:
    """All speeches with a word are predicted, with their ends, and beginnings but for the first of each stream."""
    text = {"length": 256, "pack": True}
    dataset = load_dataset(validated(DataConfig, {"name": "shakespeare", "text": text}, "a test"), 0)
    with gzip.open(ROOT / "shakespeare.json.gz") as file:
        turns = [(who, speech) for who, speech in json.load(file)["turns"] if speech]
    speakers = {who for who, _ in turns}
    assert dataset.text is not None
    assert dataset.keys is not None and len(dataset.keys.names) == len(speakers)
    targets = int((dataset.y_train >= 0).sum() + (dataset.y_test >= 0).sum())
    tested = len(np.unique([who for who in speakers if round(0.1 * sum(w == who for w, _ in turns))]))
    assert targets == sum(len(speech.encode()) + 2 for _, speech in turns) - len(speakers) - tested


@pytest.mark.parametrize("parts", [("train", "test"), ("Train", "val"), ("train",)])
def test_folders_of_texts(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """What is hidden is no text. Without a part of test data a share of the texts are tests."""
    for part, label, name, text in (
        (parts[0], "good", "1", "a joy"), (parts[0], "bad", "1", "a bore"), (parts[-1], "good", "2", "dull"),
        (parts[0], ".ipynb_checkpoints", "1", "a copy"),
    ):  # fmt: skip
        (tmp_path / part / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / part / label / f"{name}.txt").write_text(text)
    tree = {"name": "text", "path": str(tmp_path), "text": {"length": 8, "test_share": 0.3}}
    dataset = load_dataset(validated(DataConfig, tree, "a test"), 0)
    assert dataset.class_names == ("bad", "good") and dataset.y_train.tolist() == [0, 1]
    assert dataset.text is not None
    assert dataset.text.tokenizer.decode(dataset.x_test[0].flatten().tolist()) == "dull"
    with pytest.raises(InputError, match=r"data\.key = 'who': a folder of texts has no columns"):
        load_dataset(validated(DataConfig, {**tree, "key": "who"}, "a test"), 0)
    (tmp_path / parts[0] / "bad" / "2.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"2\.txt: cannot be read as text in UTF-8"):
        load_dataset(validated(DataConfig, tree, "a test"), 0)
    with pytest.raises(InputError, match=r"no text lies in LABEL/NAME\.txt"):
        load_dataset(validated(DataConfig, {**tree, "path": str(tmp_path / parts[0] / "good")}, "a test"), 0)


def test_a_json_file_that_is_no_list(tmp_path: Path) -> None:
    for content, words in (
        ('{"what": "x"}', "expected a JSON list of objects"),
        ("[3]", "entry 1: expected a JSON object"),
    ):
        with pytest.raises(InputError, match=words):
            load_dataset(config(own(tmp_path, content, "own.json")), 0)
