"""Tiny Shakespeare with its speakers (Karpathy 2015): clients by nature."""

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
