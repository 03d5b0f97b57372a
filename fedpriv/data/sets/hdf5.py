"""HDF5 files in the layout of TensorFlow Federated: examples/CLIENT/FIELD, such as fed_emnist_train.h5."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedpriv.core.errors import InputError, one_line, optional, some_of
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import LABEL_BYTES, NAME_BYTES, Arrays, check_memory
from fedpriv.data.own import ClientExamples, OwnFile, image_shares, text_shares
from fedpriv.data.source import Place, by_part, home, split_names

_ENDINGS = (".h5", ".hdf5")
_MADE_OF_A_LABEL = 5 * LABEL_BYTES  # a number is an object of Python's, and a pointer to it
_IMAGES, _TEXTS = ("pixels", "image", "x"), ("snippets", "text", "tokens")  # the first of these that a client has


@DATASETS.register
class ClientGroups(OwnFile):
    """One file, or a folder with one whose name tells of training and one of test data; every group is a client."""

    name = "hdf5"
    title = "own data in TensorFlow Federated's format"
    reads = ("label", "test_share", "text", "channels")

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
        parts = by_part(sorted(path for path in root.iterdir() if path.suffix.lower() in _ENDINGS))
        if not parts:
            raise InputError(f"{root}: holds no file of training data, such as NAME_train.h5")
        chosen = [parts[name] for name in split_names(list(parts), str(root))]
        several = next((paths for paths in chosen if len(paths) > 1), None)
        if several is not None:
            names = some_of([path.name for path in several])
            raise InputError(f"{root}: holds {names}; one file of training and one of test data are read")
        return tuple(path for (path,) in chosen)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    h5py = optional("h5py", "hdf5", "data.name = 'hdf5'")
    try:
        file = h5py.File(path, "r")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, or folder with NAME_train.h5 and NAME_test.h5") from None
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
        raise InputError(
            f"{path}: has no group 'examples', whose groups are clients; it has {some_of(list(file))}",
            hint="data.name = 'npz' reads arrays that numpy.savez writes",
        )
    for owner, fields in clients.items():
        where = f"{path}: client {owner!r}"
        names = [name for name, field in fields.items() if hasattr(field, "dtype")] if hasattr(fields, "items") else []
        wanted = _IMAGES if place.text is None else (place.text.text, *_TEXTS)
        values = next((fields[name] for name in wanted if name in names), None)
        if values is None:
            raise InputError(f"{where}: expected {' or '.join(wanted)}; it has {some_of(names)}")
        if place.text is not None:
            if values.dtype.kind not in "OS" or values.ndim != 1:
                raise InputError(f"{where}: its texts are {values.dtype} of shape {values.shape}; expected a list")
            check_memory(where, NAME_BYTES * len(values), place.memory)
            yield ClientExamples(owner, [_text(text, where) for text in values[:]], [], where)
            continue
        label = place.label or "label"
        if label not in names or fields[label].ndim != 1 or fields[label].dtype.kind not in "iu":
            raise InputError(f"{where}: expected {label!r}, a whole number for each image; it has {some_of(names)}")
        if values.dtype.kind not in "buif" or values.ndim not in (3, 4):
            raise InputError(f"{where}: images are {values.dtype} of shape {values.shape}; expected (n, H, W[, C])")
        if len(values) != len(fields[label]):
            raise InputError(f"{where}: {len(values)} examples and {len(fields[label])} labels")
        check_memory(where, 2 * values.size + _MADE_OF_A_LABEL * len(values), place.memory)
        yield ClientExamples(owner, values, fields[label][:].tolist(), where)


def _text(text: bytes, where: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: a text is no UTF-8: {one_line(error)}") from None
