"""Sentences: their scores against published and counted figures, pairs, guesses, and their lines in scores.jsonl."""

from pathlib import Path

import pytest
import torch

from fedpriv.attacks.reconstruction import Reconstruction, Restart
from fedpriv.attacks.referee import Truth, bare, missed, score, score_guesses
from fedpriv.attacks.texts.referee import exact_chance, likeness, pairs, sentence_guesses, sentence_score
from fedpriv.attacks.texts.scene import padded
from fedpriv.core.columns import worded
from fedpriv.core.records import sentence_result
from fedpriv.core.runs import RunFolder
from fedpriv.data.tokenizers import Bytes
from tests.cases import in_one_test


def tokens(text: str) -> list[int]:
    words = sorted(
        {*["the", "cat", "was", "found", "under", "bed", "police", "killed", "gunman", "kill", "testing", "one", "two"]}
    )
    return [3 + words.index(word) for word in text.split()]


@in_one_test(
    ("true", "made", "wanted"),
    [
        # Lin 2004, section 3: "police killed the gunman" and two candidates, ROUGE-L (beta = 1) 3/4 and 2/4.
        ("police killed the gunman", "police kill the gunman", (0.75, 1 / 3, 0.75)),
        ("police killed the gunman", "the gunman kill police", (0.75, 1 / 3, 0.5)),
        # The test of Google's rouge_score: "testing one two" and "testing": ROUGE-1 0.5.
        ("testing one two", "testing", (0.5, 0.0, 0.5)),
        ("the cat was found under the bed", "the cat was under the bed", (12 / 13, 8 / 11, 12 / 13)),
        ("the cat", "", (0.0, 0.0, 0.0)),
    ],
)
def test_rouge_is_that_of_the_papers(true: str, made: str, wanted: tuple[float, ...]) -> None:
    read = sentence_score(tokens(true), tokens(made))
    assert (read.rouge1, read.rouge2, read.rouge_l) == pytest.approx(wanted, abs=1e-6)
    assert not read.exact and read.tokens == len(true.split())


def test_a_whole_sentence() -> None:
    read = sentence_score([5, 6, 7], [5, 6, 7])
    assert read.exact and (read.rouge1, read.rouge2, read.rouge_l, read.right) == (1, 1, 1, 3)


def test_what_is_no_text_does_not_count() -> None:
    assert bare(torch.tensor([1, 5, 6, 2, 1, 7, 0])) == [5, 6, 7]
    assert bare(torch.tensor([[[5, 1, 6, 0]]])) == [5, 6]


def test_sentences_are_paired_by_likeness() -> None:
    true = [[3, 4, 5], [6, 7, 8], [9]]
    assert pairs(true, [[6, 7, 3], [3, 4, 9]]) == {0: 1, 1: 0}
    assert pairs(true, []) == {} and likeness([3, 4], [4, 3]) == 0.5 and likeness([], []) == 1


def truth(sentences: list[list[int]], others: list[list[int]] | None = None) -> Truth:
    rest = None if others is None else padded(others, 6)[:, None, None]
    return Truth(
        1, 0, padded(sentences, 6)[:, None, None], torch.zeros(len(sentences), dtype=torch.int64),
        others=rest, tokenizer=Bytes(), other_labels=None if rest is None else torch.zeros(len(rest)),
    )  # fmt: skip


def reading(sentences: list[list[int]]) -> Reconstruction:
    labels = torch.zeros(len(sentences), dtype=torch.int64)
    return Reconstruction(1, 0, "dager", (Restart(padded(sentences, 6)[:, None, None], labels, 0.5, 3),), 0, "", 1.0)


def test_lines_of_sentences_are_written_and_read(tmp_path: Path) -> None:
    known = truth([[1, 70, 71, 72], [1, 80, 81]], [[1, 70, 71, 73], [1, 90], [1, 80, 81]])
    scored = score(reading([[1, 70, 71, 72]]), "unprotected", known, [], (0.5,), 0.6)
    first, second = scored.scores
    assert first.recovered and first.rank == 1 and first.candidates == 4 and first.mse is None
    # Nothing was offered for it, and a copy of the original is no other sentence.
    assert not second.recovered and second.words is not None and second.words.rouge1 == 0 and second.candidates == 3
    assert scored.pictures.keys() == {0} and "1 sentences read for 2 true ones" in first.note
    (tmp_path / "reconstructions").mkdir()
    folder = RunFolder(tmp_path)
    folder.write_scores(scored.scores)
    assert folder.scores() == scored.scores
    line = scored.scores[0].to_json()
    assert {"sentence", "words"} < set(line) and not {"image", "mse", "psnr", "cells"} & set(line)
    result = sentence_result(each.words for each in scored.scores)
    assert result is not None and (result.rouge1, result.exact, result.right, result.tokens) == (0.5, 1, 3, 5)


def test_a_guess_that_is_right_recovers_nothing() -> None:
    known, guess = truth([[1, 70]]), sentence_guesses(padded([[1, 70], [1, 70]], 6)[:, None, None])
    assert bare(guess[0].image) == [70]
    assert not score(reading([[1, 70]]), "unprotected", known, guess, (0.5,), 0.6).scores[0].recovered
    assert not any(each.recovered for each in score_guesses(guess, known, (0.5,)).scores)


def test_sentences_that_never_saw_an_upload_are_paired_like_an_attacks() -> None:
    """Pairing alone finds words: public sentences, in any order, score as an attack that offers them."""
    texts = [[1, 70, 71], [1, 80, 81], [1, 90, 91]]
    public = padded(texts, 6)[:, None, None]
    lines = score_guesses(sentence_guesses(public), truth(texts[::-1]), (0.5,)).scores
    drawn = [line for line in lines if line.attack == "guess-drawn"]
    assert [line.words.exact for line in drawn if line.words is not None] == [True] * 3
    assert not any(line.recovered for line in drawn) and {line.offered for line in drawn} == {3}
    alone = score_guesses(sentence_guesses(public), truth(texts[:1]), (0.5,)).scores
    assert {line.attack for line in alone} == {"guess-frequent", "guess-model"}


def test_a_refused_upload_counts_as_missed() -> None:
    lines = missed(truth([[1, 70], [1, 71]]), "dager", "protected", (), picked=False)
    assert len(lines) == 2 and all(line.words is not None and line.words.rouge1 == 0 for line in lines)


def test_guesses_are_frequent_tokens_and_a_sample() -> None:
    public = padded([[1, 70, 71, 72], [1, 70, 71, 73], [1, 70, 74, 75]], 8)[:, None, None]
    frequent, sample, _ = sentence_guesses(public)
    assert bare(frequent.image) == [70, 71, 72]
    made = bare(sample.image)
    assert made and set(made) <= {70, 71, 72, 73, 74, 75}
    assert torch.equal(sample.image, sentence_guesses(public)[1].image)  # the same in every experiment
    assert frequent.image.shape == (1, 1, 8)


def test_how_often_one_sentence_is_right() -> None:
    """Of 100 public sentences half are the same: the upper limit is above that, and not by much."""
    same = padded([[1, 70]] * 2, 4)
    public = torch.cat([torch.cat([same, padded([[1, 71 + n], [1, 140 + n]], 4)]) for n in range(25)])[:, None, None]
    assert 0.5 < exact_chance(public, sentence_guesses(public)) < 0.75
    assert exact_chance(public[:1], ()) == 1


def test_words_for_kinds() -> None:
    text = "an image and pictures of a picture"
    assert worded(text, "sentence") == "a sentence and sentences of a sentence" and worded(text, "image") == text
