"""Public texts: speeches of plays, news, sentences, film reviews and messages."""

import gzip
import json
import zlib
from pathlib import Path

from typing_extensions import override

from fedpriv.core.config.data import CorpusConfig
from fedpriv.core.errors import InputError
from fedpriv.core.registry import DATASETS
from fedpriv.data.texts import Corpus, Row, TextColumns, TextSplit, split_by_key


@DATASETS.register
class AgNews(Corpus):
    """Titles and descriptions of news with their topics (Zhang, Zhao and LeCun 2015)."""

    name = "agnews"
    title = "AG News, topics of news"
    file = "agnews.csv.gz"
    columns = TextColumns("text", "label")
    labels = (("0", "World"), ("1", "Sports"), ("2", "Business"), ("3", "Technology"))


@DATASETS.register
class Cola(Corpus):
    """Sentences of publications on syntax (Warstadt, Singh and Bowman 2019).

    Tests are those of GLUE's development set, in and out of domain.
    """

    name = "cola"
    title = "CoLA, acceptable sentences"
    file = "cola.csv.gz"
    columns = TextColumns("sentence", "label")
    labels = (("0", "unacceptable"), ("1", "acceptable"))
    tests = ("dev", "dev_ood")


@DATASETS.register
class RottenTomatoes(Corpus):
    """Sentences of film reviews with their polarity (Pang and Lee 2005)."""

    name = "rotten_tomatoes"
    title = "Rotten Tomatoes, film reviews"
    file = "rotten_tomatoes.csv.gz"
    columns = TextColumns("sentence", "label")
    labels = (("0", "negative"), ("1", "positive"))


@DATASETS.register
class SmsSpam(Corpus):
    """Messages of people (Almeida, Gomez Hidalgo and Yamakami 2011).

    Repeats are left out, and the last ones are tests.
    """

    name = "sms_spam"
    title = "SMS Spam Collection, text messages"
    file = "sms_spam.csv.gz"
    columns = TextColumns("text", "label")
    labels = (("ham", "ham"), ("spam", "spam"))
    tests = ()
    has_repeats = True


@DATASETS.register
class Sst2(Corpus):
    """Phrases of film reviews to train with, sentences to test with (Socher et al. 2013)."""

    name = "sst2"
    title = "SST-2, phrases of film reviews"
    file = "sst2.csv.gz"
    columns = TextColumns("sentence", "label")
    labels = (("0", "negative"), ("1", "positive"))


@DATASETS.register
class Shakespeare(Corpus):
    """Speeches of 309 speakers; those without a word are left out, and the last ones of each speaker are tests."""

    name = "shakespeare"
    title = "Tiny Shakespeare, speeches"
    file = "shakespeare.json.gz"
    columns = TextColumns("text", key="speaker")

    @classmethod
    @override
    def wanted(cls) -> str:
        return f'{cls.title}, as gzipped JSON: {{"turns": [[speaker, speech], ...]}}'

    @classmethod
    @override
    def parts(cls, path: Path, config: CorpusConfig) -> TextSplit:
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                turns = json.load(file)["turns"]
                rows = [Row(str(speech), key=str(speaker)) for speaker, speech in turns if speech]
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path}: not the file of Tiny Shakespeare: {type(error).__name__}") from None
        return split_by_key(rows, config, str(path))
