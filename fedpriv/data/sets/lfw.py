"""Labeled Faces in the Wild as a classification task, the way of Faustini et al. (2023), section 4.

Kept are the people with at least 14 images, and 14 images of each, drawn once by a fixed public stream; a stratified
fifth of them (one in five of the whole, two or three a person) is the test set. 106 people have that many images:
1,484 in all, of which 1,187 train and 297 test.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import numpy as np
from PIL import Image
from typing_extensions import override

from fedpriv.core.errors import InputError, one_line
from fedpriv.core.npz import DAMAGE
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import PUBLIC_SEED, Arrays, read_labels, read_npz, stratified
from fedpriv.data.torchvision_files import Torchvision

IMAGES_PER_PERSON = 14
SIDE = 250  # of a deep-funneled picture, in pixels
CROP = slice(61, 189)  # rows and columns 61 to 188: the central 128
BLOCK = 4


@DATASETS.register
class Faces(Torchvision):
    """Deep-funneled pictures, one subfolder a person; or an archive, whose own two parts are put together."""

    name = "lfw"
    title = "Labeled Faces in the Wild"
    folder = "lfw-py/lfw-deepfunneled"
    fetcher = "LFWPeople"
    options = MappingProxyType({"image_set": "deepfunneled"})
    mean = std = (0.5, 0.5, 0.5)

    @classmethod
    @override
    def read_archive(cls, path: Path, memory: int) -> Arrays:
        parts = read_npz(path, memory)
        images = np.concatenate([parts.x_train, parts.x_test])
        labels = np.concatenate([parts.y_train, parts.y_test]).astype(np.int64)
        chosen, people = _choose(labels, str(path))
        names = tuple(parts.class_names[person] if parts.class_names else str(person) for person in people)
        return stratified(images[chosen], np.searchsorted(people, labels[chosen]), 0.2, names)

    @classmethod
    @override
    def count_archive(cls, path: Path, memory: int) -> int:
        _, counts = np.unique(read_labels(path, memory), return_counts=True)  # of labels as large as they like
        return IMAGES_PER_PERSON * int((counts >= IMAGES_PER_PERSON).sum())

    @classmethod
    @override
    def read_folder(cls, folder: Path, memory: int) -> Arrays:
        """Read 250x250 pictures, cut to their central 128x128 pixels and averaged over 4x4 blocks to 32x32."""
        pictures = _pictures(folder)
        names = sorted(pictures)
        paths = [path for name in names for path in pictures[name]]
        labels = np.repeat(np.arange(len(names)), [len(pictures[name]) for name in names])
        chosen, people = _choose(labels, str(folder))
        images = np.stack([_reduced(paths[index]) for index in chosen])
        people_names = tuple(names[person] for person in people)
        return stratified(images, np.searchsorted(people, labels[chosen]), 0.2, people_names)

    @classmethod
    @override
    def count_folder(cls, folder: Path) -> int:
        return IMAGES_PER_PERSON * sum(len(paths) >= IMAGES_PER_PERSON for paths in _pictures(folder).values())


def _pictures(folder: Path) -> dict[str, list[Path]]:
    return {person.name: sorted(person.glob("*.jpg")) for person in folder.iterdir() if person.is_dir()}


def _choose(labels: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen images, ascending, and the people they show, ascending."""
    from fedpriv.core.randomness import numpy_stream

    people = np.flatnonzero(np.bincount(labels) >= IMAGES_PER_PERSON)
    if len(people) < 2:
        raise InputError(
            f"{where}: {len(people)} people have {IMAGES_PER_PERSON} images or more; expected at least 2 such people"
        )
    stream = numpy_stream(PUBLIC_SEED, Faces.name)
    drawn = [stream.choice(np.flatnonzero(labels == person), IMAGES_PER_PERSON, replace=False) for person in people]
    return np.sort(np.concatenate(drawn)), people


def _reduced(path: Path) -> np.ndarray:
    try:
        with Image.open(path) as picture:
            width, height = picture.size
            # Nothing is unpacked before its size is known to be the right one.
            pixels = np.asarray(picture.convert("RGB")) if (width, height) == (SIDE, SIDE) else None
    except (*DAMAGE, Image.DecompressionBombError) as error:
        raise InputError(f"{path}: not a picture, truncated or damaged: {one_line(error)}") from None
    if pixels is None:
        raise InputError(f"{path}: {width}x{height} pixels; expected {SIDE}x{SIDE}")
    centre = pixels[CROP, CROP].astype(np.float64)
    side = len(centre) // BLOCK
    reduced: np.ndarray = np.rint(centre.reshape(side, BLOCK, side, BLOCK, 3).mean(axis=(1, 3)))
    return reduced.astype(np.uint8)
