"""A data set of your own: the .npz file that ``data.path`` names."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.data.source import Place, Source, home
from fedpriv.registry import DATASETS

if TYPE_CHECKING:
    from fedpriv.data.files import Arrays

__all__ = ["OwnFile"]


@DATASETS.register
class OwnFile(Source):
    """x_train, y_train, x_test, y_test and, if you like, class_names."""

    name: ClassVar[str] = "npz"
    title: ClassVar[str] = "own file"
    needs_path: ClassVar[bool] = True

    @classmethod
    @override
    def read(cls, place: Place) -> "tuple[Arrays, str]":
        from fedpriv.data.files import read_npz

        return read_npz(home(place.path), place.memory), place.path

    @classmethod
    @override
    def status(cls, place: Place) -> None:
        return None

    @classmethod
    @override
    def scale(cls, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return (0.5,) * channels, (0.5,) * channels
