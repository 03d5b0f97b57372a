"""Data of your own: what all forms of files share, from the examples and their owners to training and test data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from fedpriv.core.errors import InputError, some_of
from fedpriv.data.files import Arrays, Keys, checked
from fedpriv.data.source import Source

if TYPE_CHECKING:
    import numpy as np

PUBLIC_SEED = 0  # the choice of test examples is part of the data set, the same for every experiment
TEST_SHARE = 0.2
TRAIN, TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation", "dev")
"""What parts of data sets are called; of several test parts the first in this order is read."""


class OwnFile(Source):
    """The file or folder that ``data.path`` names."""

    needs_path = True

    @classmethod
    @override
    def status(cls, place: object) -> None:
        return None


def split_rows(owners: Sequence[str] | None, count: int, share: float, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Draw the test examples, the share of each owner's or of all, and return the rows of training and of test data."""
    import numpy as np

    from fedpriv.core.randomness import numpy_stream

    order = numpy_stream(PUBLIC_SEED, "test rows").permutation(count)
    numbers = np.zeros(count, np.int64) if owners is None else Keys.of(owners, ()).train
    sizes = np.bincount(numbers)
    grouped = order[np.argsort(numbers[order], kind="stable")]
    place = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of each among its owner's
    is_test = place < np.repeat(np.rint(share * sizes), sizes)
    if is_test.all() or not is_test.any():
        lacking = "training" if is_test.all() else "test"
        raise InputError(f"{where}: data.test_share = {share:g} of {count} examples leaves no {lacking} example")
    return np.sort(grouped[~is_test]), np.sort(grouped[is_test])


def label_numbers(
    labels: Sequence[Any], tests: int, where: str, named: tuple[str, ...] = ()
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the number of each label and the classes; of the last ``tests`` no class is known.

    Classes are those that are ``named``, else those of the other labels, in order.
    """
    import numpy as np

    classes = named or tuple(sorted(set(labels[: len(labels) - tests])))
    numbers = {name: number for number, name in enumerate(classes)}
    names = tuple(map(str, classes))
    strange = next((label for label in labels if label not in numbers), None)
    if strange is not None:
        raise InputError(
            f"{where}: no training example has the class {strange!r}; training examples have {some_of(names)}"
        )
    return np.array([numbers[label] for label in labels], np.int64), names


def image_arrays(
    images: np.ndarray,
    labels: np.ndarray,
    tests: int,
    classes: tuple[str, ...],
    owners: Sequence[str] | None,
    where: str,
) -> Arrays:
    """Return images (N, C, H, W), of which the last ``tests`` are test images, as they are, as a data set's parts."""
    first = len(images) - tests
    keys = None if owners is None else Keys.of(owners[:first], owners[first:])
    pixels = images.transpose(0, 2, 3, 1)
    return checked(Arrays(pixels[:first], labels[:first], pixels[first:], labels[first:], classes, keys=keys), where)
