"""Adult: who earns more than 50,000 dollars, from the US census of 1994 (Becker and Kohavi 1996).

The columns are public: their values and ranges are those of the data set's description and of the census' codes, not
what the rows happen to hold. Unknown values, ``?``, are a value of their own.
"""

from pathlib import Path

import numpy as np
from typing_extensions import override

from fedpriv.core.columns import ColumnSpec
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays
from fedpriv.data.source import Place, SingleFile


def _values(name: str, text: str) -> ColumnSpec:
    return ColumnSpec(name, "category", tuple(text.split()))


def _whole(name: str, low: int, high: int) -> ColumnSpec:
    return ColumnSpec(name, "number", low=low, high=high, whole=True)


ADULT = (
    _whole("age", 17, 90),
    _values(
        "workclass",
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked ?",
    ),
    _whole("fnlwgt", 0, 1_500_000),
    _values(
        "education",
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters 1st-4th 10th "
        "Doctorate 5th-6th Preschool",
    ),
    _whole("education-num", 1, 16),
    _values(
        "marital-status",
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse",
    ),
    _values(
        "occupation",
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
        "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv Armed-Forces "
        "?",
    ),
    _values("relationship", "Wife Own-child Husband Not-in-family Other-relative Unmarried"),
    _values("race", "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
    _values("sex", "Female Male"),
    _whole("capital-gain", 0, 99_999),
    _whole("capital-loss", 0, 5_000),
    _whole("hours-per-week", 1, 99),
    _values(
        "native-country",
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India Japan Greece South "
        "China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland France "
        "Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland Thailand "
        "Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands ?",
    ),
)
_LABEL, _CLASSES = "income", ("<=50K", ">50K")
_SPLIT, _PARTS = "split", ("train", "test")


@DATASETS.register
class Adult(SingleFile):
    """A CSV file with a header, the 15 columns and ``split``: train or test."""

    name = "adult"
    title = "Adult, the census of 1994"
    file = "adult.csv.gz"
    kind = "a CSV file"
    origin = (
        "UCI's Adult (archive.ics.uci.edu, adult.data and adult.test) as one CSV file with a header, gzipped, with a "
        "column split: train or test"
    )
    mean = (0.0,)
    std = (1.0,)
    class_names = _CLASSES

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        from fedpriv.data.tables import encode, label_numbers, read_cells, rows_of

        path = cls.found(place)
        cells = read_cells(path, ",", (), place.memory)
        part = label_numbers(cells, _SPLIT, _PARTS)
        labels = label_numbers(cells, _LABEL, _CLASSES)
        train, test = (rows_of(cells, np.flatnonzero(part == number)) for number in range(len(_PARTS)))
        rows = [encode(each, ADULT)[:, None] for each in (train, test)]
        return Arrays(rows[0], labels[part == 0], rows[1], labels[part == 1], _CLASSES, ADULT), str(path)

    @classmethod
    @override
    def count(cls, path: Path, memory: int) -> int:
        from fedpriv.data.tables import read_cells

        return len(read_cells(path, ",", (), memory))
