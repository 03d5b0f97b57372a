"""Location-30: which of 446 places in Bangkok a person has checked in at, and one of 30 kinds of person.

The data set of the first membership inference attacks (Shokri et al. 2017), from public Foursquare check-ins
(github.com/privacytrustlab/datasets). A row has 446 flags, which lie in memory as one line of
pixels, black or white.
"""

from pathlib import Path

import numpy as np
from typing_extensions import override

from fedpriv.core.columns import ColumnSpec
from fedpriv.core.errors import InputError
from fedpriv.core.npz import Header, read_arrays, require_headers
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays, check_labels, check_memory, stratified
from fedpriv.data.source import Place, SingleFile

_TEST = 1010  # of 5,010 people; a fixed stratified choice


@DATASETS.register
class Location30(SingleFile):
    """An archive with x (N, 446), 0 or 1, and y (N,)."""

    name = "location30"
    title = "Location-30, check-ins of people"
    is_facts = True
    file = "location30.npz"
    kind = "an .npz file"
    origin = "an archive of x, places of 5,010 people, 0 or 1, and y, their groups from 0 (Shokri et al., S&P 2017)"

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        path = cls.found(place)
        headers = _headers(path)
        check_memory(path, sum(4 * header.nbytes for header in headers.values()), place.memory)
        arrays = read_arrays(path, headers)
        places, labels = arrays["x"], arrays["y"]
        check_labels(labels, len(places), f"{path}: y")
        if places.max(initial=0) > 1:
            raise InputError(f"{path}: x has the value {places.max()}; expected 0 or 1")
        images = places[:, None, :] * np.uint8(255)
        columns = tuple(
            ColumnSpec(f"place {number}", "flag", ("no", "yes")) for number in range(1, places.shape[1] + 1)
        )
        return stratified(images, labels, _TEST / 5010, columns=columns), str(path)

    @classmethod
    @override
    def count(cls, path: Path, memory: int) -> int:
        return _headers(path)["y"].size


def _headers(path: Path) -> dict[str, Header]:
    headers = require_headers(path, ("x", "y"))
    if headers["x"].dtype != "uint8" or headers["x"].ndim != 2:
        raise InputError(f"{path}: x is {headers['x'].dtype} of shape {headers['x'].shape}; expected uint8 (N, D)")
    return headers
