"""Data of your own: what all forms of files share, from the examples and their owners to training and test data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import override

from fedpriv.core.columns import is_signal
from fedpriv.core.config.data import CorpusConfig
from fedpriv.core.errors import InputError, cut, some_of
from fedpriv.data.files import PUBLIC_SEED, Arrays, Keys, channels_are_last, check_memory
from fedpriv.data.source import Place, Source
from fedpriv.data.texts import Row, own_texts

TEST_SHARE = 0.2
FEW = 20  # values at the most of what may be categories or classes, also where they are numbers
_TWELVE_BITS = 4095  # as cameras and scanners have them, in 16
_PIECE = 1 << 20  # numbers that are scaled at once


class OwnFile(Source):
    """The file or folder that ``data.path`` names."""

    needs_path = True
    read_off = "The classes, and the shape of examples, were read off the files, and are taken as public."

    @classmethod
    @override
    def status(cls, place: Place) -> None:
        return None


def split_rows(
    owners: Sequence[str] | None,
    count: int,
    share: float,
    where: str,
    key: str = "data.test_share",
    people: Sequence[str] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the test examples, the share of each owner's or of all, and return the rows of training and of test data.

    All examples of one of ``people`` are on one side: a person's test examples would be public, and a model that knows
    the person would be tested on it.
    """
    from fedpriv.core.randomness import numpy_stream

    units = np.arange(count) if people is None else np.unique(people, return_inverse=True)[1]
    first = np.unique(units, return_index=True)[1]  # a person counts for the client of the first example
    order = numpy_stream(PUBLIC_SEED, "test rows").permutation(len(first))
    numbers = np.zeros(len(first), np.int64) if owners is None else Keys.of(owners, ()).train[first]
    sizes = np.bincount(numbers)
    grouped = order[np.argsort(numbers[order], kind="stable")]
    place = np.arange(len(first)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of each among its owner's
    is_test = np.isin(units, grouped[place < np.repeat(np.rint(share * sizes), sizes)])
    if is_test.all() or not is_test.any():
        lacking = "training" if is_test.all() else "test"
        whose = f"{len(first)}" if owners is None or not count else f"each client's, at most {sizes.max()},"
        what = "examples" if people is None else "persons"
        most = int(sizes.max(initial=0))
        hint = f"{(50 // most + 1) / 100:g} leaves one" if most > 1 and not is_test.any() else ""
        raise InputError(f"{where}: {key} = {share:g} of {whose} {what} leaves no {lacking} example", hint=hint)
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def refuse_share(place: Place) -> None:
    """Refuse a share of test examples where the files have test data."""
    if place.test_share is not None:
        raise InputError(
            key="data.test_share", given=place.test_share, allowed=f"{place.path} has test data of its own"
        )


def order_rows(
    owners: Sequence[str] | None, count: int, given: int, place: Place, people: Sequence[str] | None = None
) -> tuple[np.ndarray, int]:
    """Return the rows in their order, training before test data, and how many are test data; the last ``given`` are."""
    if given:
        refuse_share(place)
        return np.arange(count), given
    train, test = split_rows(owners, count, place.test_share or TEST_SHARE, place.path, people=people)
    return np.concatenate([train, test]), len(test)


def label_numbers(
    labels: Sequence[Any], tests: int, where: str, named: tuple[str, ...] = ()
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the number of each label and the classes: ``named`` ones, else in order; tests' may be unknown."""
    given = set(labels[: len(labels) - tests])
    if len(odd := {type(label): label for label in given}) > 1:
        shown = " and ".join(map(repr, odd.values()))
        raise InputError(f"{where}: its labels are of several types, such as {shown}; one is expected")
    classes = named or tuple(sorted(given))
    numbers = {name: number for number, name in enumerate(classes)}
    names = tuple(map(str, classes))
    strange = next((label for label in labels if label not in numbers), None)
    if strange is not None:
        raise InputError(
            f"{where}: no training example has the class {strange!r}; training examples have {some_of(names)}"
        )
    return np.array([numbers[label] for label in labels], np.int64), names


def numbered_labels(
    train: np.ndarray, test: np.ndarray, where: str, named: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return labels as numbers from 0, and the classes: of texts, and of whole numbers with gaps, those there are."""
    if "U" not in (train.dtype.kind, test.dtype.kind):
        there = np.unique(train)
        gapless = np.array_equal(there, np.arange(len(there))) and np.isin(test, there).all()
        if named or gapless or there.dtype.kind not in "iu" or train.ndim != 1 or not len(there) or there[0] < 0:
            return train, test, named  # what is wrong with them :func:`~fedpriv.data.files.checked` says
        if len(there) > FEW and len(there) <= there[-1] - there[0]:
            raise InputError(
                f"{where}: its labels are {len(there)} different numbers from {there[0]} to {there[-1]}; fedpriv "
                "classifies: write ranges of an amount (numpy.digitize), or say in class_names which classes there are"
            )
    numbers, classes = label_numbers([*train.tolist(), *test.tolist()], len(test), where, named)
    return numbers[: len(train)], numbers[len(train) :], classes


def image_arrays(
    labels: Sequence[Any],
    given: int,
    place: Place,
    read: Callable[[np.ndarray], np.ndarray],
    owners: Sequence[str] | None = None,
    people: Sequence[str] | None = None,
    named: tuple[str, ...] = (),
) -> Arrays:
    """Return images as a data set's parts; the last ``given`` are test images, or of none a share is drawn.

    ``read`` is told where each image comes to lie, and returns all of them, uint8 (N, C, H, W).
    """
    order, tests = order_rows(owners, len(labels), given, place, people)
    first = len(order) - tests

    def parted(values: Sequence[str]) -> tuple[list[str], list[str]]:
        return [values[row] for row in order[:first]], [values[row] for row in order[first:]]

    numbers, classes = label_numbers([labels[row] for row in order], given, place.path, named)
    pixels = read(np.argsort(order)).transpose(0, 2, 3, 1)
    keys = None if owners is None else Keys.of(*parted(owners))
    arrays = Arrays(pixels[:first], numbers[:first], pixels[first:], numbers[first:], classes, keys=keys)
    return arrays if people is None else with_people(arrays, *parted(people), place.path)


def with_people(arrays: Arrays, train: Sequence[str], test: Sequence[str], where: str) -> Arrays:
    """Say which person each training example is of, and warn of persons that have test examples, which are public."""
    names, numbers = np.unique(train, return_inverse=True)
    both = len({*names.tolist()} & {*test})
    warning = (
        f"{where}: {both:,} of {len(names):,} persons with training examples (data.owner) have test examples, too; "
        "these count as public, and the model is tested on persons that it knows"
    )
    return replace(arrays, owners=numbers, warnings=(*arrays.warnings, *([warning] if both else [])))


def as_pixels(values: np.ndarray, what: str, channels: str | None = None) -> np.ndarray:
    """Return numbers as uint8 (N, H, W) or (N, H, W, C): floating point on [0, 1] and 16 bits are scaled.

    Signals (N, T) become pictures of one row; so do (N, C, T) and (N, T, C) where ``channels`` says that C is first or
    last. Unset, (N, ., .) is a picture, and of one with channels the shape tells which axis they are.
    """
    if values.ndim == 2:
        values = values[:, None]
    elif values.ndim == 3 and channels is not None:
        values = np.expand_dims(values, 1 if channels == "last" else 2)
    if values.ndim == 4:
        is_last = channels_are_last(values.shape, channels)
        if is_last is None:
            raise InputError(
                f"{what} has shape {values.shape}: data.channels = 'first' or 'last' says which axis has the channels, "
                "such as a volume's slices"
            )
        values = values if is_last else values.transpose(0, 2, 3, 1)
    if values.dtype == np.uint8 or not values.size:
        return values.astype(np.uint8, copy=False)
    top = _range(values.dtype)
    low, high = values.min(), values.max()
    if not 0 <= low <= high <= top:
        allowed = "0 to 255 in whole numbers, or 0 to 1 in floating point" if top <= 255 else "0 to 65535"
        check_finite(values, what)
        hint = "(x - low) / (high - low) fits, with public constants low and high, and x clipped to them"
        if low >= 0 and 127 < high <= 255 and bool((values == np.floor(values)).all()):
            hint = "x.astype('uint8') fits"
        raise InputError(f"{what} is {values.dtype} from {low:g} to {high:g}; expected {allowed}", hint=hint)
    if top == 0xFFFF and high <= _TWELVE_BITS:
        raise InputError(
            f"{what} is uint16 up to {high}, nearly black where 65535 is white; save uint8, or multiply by "
            f"{top // max(int(high), 1)}"
        )
    pixels = np.empty(values.shape, np.uint8)
    each = max(1, _PIECE // max(1, values[0].size))
    for start in range(0, len(values), each):
        pixels[start : start + each] = np.rint(values[start : start + each].astype(np.float64) * (255 / top))
    return pixels


def check_finite(values: np.ndarray, what: str) -> None:
    """Refuse NaN and infinity, and say in which examples they are."""
    if values.dtype.kind != "f":
        return
    flat = values.reshape(len(values), -1)
    odd = np.flatnonzero(~np.isfinite(flat).all(axis=1))
    if len(odd):
        first = flat[odd[0]]
        more = f" (and {len(odd) - 1:,} more examples)" if len(odd) > 1 else ""
        raise InputError(f"{what}[{odd[0]}] holds {first[~np.isfinite(first)][0]}{more}; expected finite numbers")


def _range(dtype: np.dtype[np.generic]) -> int:
    """The number that is white."""
    if dtype.kind in "bf":
        return 1
    return 0xFFFF if dtype == "uint16" else 255


def as_labels(values: np.ndarray, what: str) -> np.ndarray:
    """Return labels (N,), numbers or texts, of (N,), (N, 1), or (N, K) with one 1 in each row."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim == 2 and values.dtype.kind in "buif":
        one = (values == 1).sum(1) == 1
        odd = np.flatnonzero(~(one & ((values == 0).sum(1) == values.shape[1] - 1)))
        if len(odd):
            row = str(values[odd[0]].tolist())
            allowed = "expected one 1 in each row, and 0 elsewhere: an example has one label, such as one column"
            raise InputError(f"{what}: row {odd[0] + 1:,} is {cut(row)}; {allowed}")
        values = values.argmax(1)
    if values.dtype == bool:
        return values.astype(np.uint8)
    if values.dtype.kind == "f":
        if not (values == np.rint(values)).all():
            raise InputError(
                f"{what} has dtype {values.dtype}; fedpriv classifies: expected integers, the numbers of classes, or "
                "those of ranges of an amount (numpy.digitize)"
            )
        values = values.astype(np.int64)
    texts = np.char.decode(values, "utf-8", "replace") if values.dtype.kind == "S" else values
    if texts.dtype.kind == "U" and (texts == "").any():
        raise InputError(f"{what}: row {int((texts == '').argmax()) + 1:,} is an empty text; each example has a label")
    return texts


def channels_note(shape: Sequence[int], what: str, channels: str | None) -> tuple[str, ...]:
    """Say which axis of images was taken as channels, where neither the setting nor a 1 or 3 says it.

    Of (N, ., .) that look like signals, say that they were taken as grey pictures; a line is both.
    """
    if len(shape) == 3 and shape[1] > 1 and channels is None and is_signal(*shape[1:]):
        axis = "first" if shape[1] < shape[2] else "last"
        taken = f"grey pictures of {shape[1]} x {shape[2]} pixels"
        return (f"{what}, {tuple(shape)}: taken as {taken}; data.channels = {axis!r} makes it signals.",)
    if len(shape) != 4 or channels is not None or shape[1] in (1, 3) or shape[3] in (1, 3):
        return ()
    axis, count = ("last", shape[3]) if channels_are_last(shape) else ("second", shape[1])
    return (f"The {axis} axis of {what}, {tuple(shape)}, was taken as {count} channels; else set data.channels.",)


@dataclass(frozen=True, eq=False)
class ClientExamples:
    """What one client holds of a part of the data."""

    owner: str
    # signals (n, T), images (n, H, W), (n, H, W, C) or (n, C, H, W), an array or what becomes one; or texts, a list
    values: Any
    labels: list[Any]  # of images
    where: str  # names it in errors

    def shape(self, channels: str | None) -> tuple[int, ...]:
        """(C, H, W) of an image, whose ``channels`` are first or last."""
        shape = tuple(self.values.shape[1:])
        if len(shape) == 2 and channels is not None:  # a signal
            shape = (1, *shape) if channels == "last" else (shape[0], 1, shape[1])
        if len(shape) in (1, 2):
            return (1,) * (3 - len(shape)) + shape
        return shape if len(shape) != 3 or not channels_are_last((0, *shape), channels) else (shape[-1], *shape[:-1])


def image_shares(parts: Sequence[Sequence[ClientExamples]], place: Place) -> Arrays:
    """Return the images of all clients, of training and, in a second part, of test data; they are read one by one."""
    shares = [share for part in parts for share in part]
    if not shares:
        raise InputError(f"{place.path}: there is no example in it")
    shape = shares[0].shape(place.channels)
    for share in shares:
        if len(share.values) != len(share.labels):
            raise InputError(f"{share.where}: {len(share.values)} examples and {len(share.labels)} labels")
        if share.shape(place.channels) != shape or len(shape) != 3:
            raise InputError(
                f"{share.where}: images have shape {tuple(share.values.shape[1:])}, and those of {shares[0].where} "
                f"{tuple(shares[0].values.shape[1:])}; expected (H, W) or (H, W, C), the same everywhere"
            )
    labels = [label for share in shares for label in share.labels]
    owners = [share.owner for share in shares for _ in share.labels]
    given = sum(len(share.labels) for part in parts[1:] for share in part)

    def read(places: np.ndarray) -> np.ndarray:
        check_memory(place.path, 2 * len(labels) * math.prod(shape), place.memory)
        images, done = np.empty((len(labels), *shape), np.uint8), 0
        for share in shares:
            pixels = as_pixels(np.asarray(share.values), share.where, place.channels)
            channels_first = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
            images[places[done : done + len(pixels)]] = channels_first
            done += len(pixels)
        return images

    arrays = image_arrays(labels, given, place, read, owners)
    return replace(arrays, notes=channels_note(shares[0].values.shape, "the examples", place.channels))


def text_shares(parts: Sequence[Sequence[ClientExamples]], place: Place) -> Arrays:
    """Return the texts of all clients, of which the next token is predicted."""
    config = place.text or CorpusConfig()
    rows = [[Row(text, key=share.owner) for share in part for text in share.values] for part in parts]
    return own_texts(rows, config, place)
