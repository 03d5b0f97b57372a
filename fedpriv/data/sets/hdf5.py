"""HDF5 files in the layout of TensorFlow Federated: examples/CLIENT/FIELD, such as fed_emnist_train.h5."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedpriv.core.errors import InputError, one_line, some_of
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays
from fedpriv.data.own import TEST, TRAIN, ClientExamples, OwnFile, image_shares, text_shares
from fedpriv.data.source import Place, home

_ENDINGS = (".h5", ".hdf5")
_IMAGES, _TEXTS = ("pixels", "image", "x"), ("snippets", "text", "tokens")  # the first of these that a client has


@DATASETS.register
class ClientGroups(OwnFile):
    """One file, or a folder with one whose name tells of training and one of test data; every group is a client."""

    name = "hdf5"
    title = "own data in TensorFlow Federated's format"
    reads = ("label", "test_share", "text")

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        with ExitStack() as stack:
            files = [(path, stack.enter_context(_opened(path))) for path in cls.files(place)]
            parts = [list(_shares(path, file, place)) for path, file in files]
            return (image_shares if place.text is None else text_shares)(parts, place), place.path

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...]:
        root = home(place.path)
        if not root.is_dir():
            return (root,)
        found = sorted(path for path in root.iterdir() if path.suffix in _ENDINGS)
        train, test = (
            next((path for path in found if any(name in path.stem for name in names)), None) for names in (TRAIN, TEST)
        )
        if train is None:
            raise InputError(f"{root}: holds no file of training data, such as NAME_train.h5")
        return (train,) if test is None else (train, test)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise InputError("data.name = 'hdf5' needs the library h5py: pip install 'fedpriv[hdf5]'") from None
    try:
        file = h5py.File(path, "r")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: not an HDF5 file, truncated or damaged: {one_line(error)}") from None
    with file:
        try:
            yield file
        except (OSError, RuntimeError, KeyError) as error:
            raise InputError(f"{path}: truncated or damaged: {one_line(error)}") from None


def _shares(path: Path, file: Any, place: Place) -> Iterator[ClientExamples]:
    clients = file.get("examples")
    if clients is None or not hasattr(clients, "items"):
        raise InputError(f"{path}: has no group 'examples', whose groups are clients; it has {some_of(list(file))}")
    for owner, fields in clients.items():
        where = f"{path}: client {owner!r}"
        names = list(fields) if hasattr(fields, "items") else []
        wanted = _IMAGES if place.text is None else (place.text.text, *_TEXTS)
        values = next((fields[name] for name in wanted if name in names), None)
        if values is None:
            raise InputError(f"{where}: wanted is {' or '.join(wanted)}; it has {some_of(names)}")
        if place.text is not None:
            if values.dtype.kind not in "OS":
                raise InputError(f"{where}: its texts are {values.dtype}")
            yield ClientExamples(owner, [text.decode(errors="replace") for text in values[:]], [], where)
            continue
        label = place.label or "label"
        if label not in names or fields[label].ndim != 1 or fields[label].dtype.kind not in "iu":
            raise InputError(f"{where}: wanted is {label!r}, a whole number for each image; it has {some_of(names)}")
        if values.dtype.kind not in "buif" or values.ndim not in (3, 4):
            raise InputError(f"{where}: images are {values.dtype} of shape {values.shape}; (n, H, W[, C]) is wanted")
        yield ClientExamples(owner, values, fields[label][:].tolist(), where)
