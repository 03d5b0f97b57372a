"""Texts of your own: the CSV file or JSON lines that ``data.path`` names, and what ``data.text`` says of them."""

from pathlib import Path

from typing_extensions import override

from fedpriv.core.config.data import CorpusConfig
from fedpriv.core.errors import InputError
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays
from fedpriv.data.source import Place, home
from fedpriv.data.texts import (
    Corpus,
    TextColumns,
    check_splits,
    own_texts,
    read_texts,
    split_by_column,
)


@DATASETS.register
class OwnTexts(Corpus):
    """A file with one text a row; a column ``split`` may say train and test."""

    name = "text"
    title = "own texts"
    needs_path = True
    reads = ("key",)
    key_hint = "data.key names the column that does"
    columns = TextColumns("text")

    @classmethod
    @override
    def found(cls, place: Place) -> Path:
        return home(place.path)

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        path, config = cls.found(place), place.text or CorpusConfig()
        if place.key and path.is_dir():
            raise InputError(key="data.key", given=place.key, allowed="a folder of texts has no columns; files have")
        rows = read_texts(path, TextColumns(config.text, config.label, place.key, prompt=config.prompt))
        check_splits(path, rows)
        parts = split_by_column(rows) if any(row.split for row in rows) else (rows,)
        return own_texts(parts, config, place, unread=rows[0].unread), place.path

    @classmethod
    @override
    def status(cls, place: Place) -> None:
        return None
