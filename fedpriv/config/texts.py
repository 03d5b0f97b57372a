"""What experiments on texts cannot ask for yet: parts that look at pictures or at rows of tables."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedpriv.errors import InputError
from fedpriv.registry import DATASETS

if TYPE_CHECKING:
    from fedpriv.config.experiment import Experiment

__all__ = ["check_texts", "refuse_texts", "text_sets", "without_attacks"]

_NONE_YET = "there is no attack on texts yet"


def text_sets() -> tuple[str, ...]:
    """The data sets that are texts."""
    return tuple(name for name, source in DATASETS.items() if source.is_text)


def without_attacks(tree: Any) -> Any:
    """Return settings in which nothing attacks texts, unless they name an attack: that is refused afterwards."""
    data = tree.get("data") if isinstance(tree, Mapping) else None
    name, adversary = (data.get("name"), tree.get("adversary", {})) if isinstance(data, Mapping) else (None, None)
    if name not in text_sets() or not isinstance(adversary, Mapping):
        return tree
    return {**tree, "adversary": {"attacks": [], **adversary}}


def check_texts(experiment: "Experiment") -> None:
    """Refuse what is for images or rows, where the data are texts.

    Raises:
        ValueError: the settings ask for it.
    """
    if not experiment.data.is_text:
        return
    what = f"data.name = {experiment.data.name!r} are texts"
    if experiment.adversary.attacks:
        raise ValueError(
            f"adversary.attacks: {experiment.adversary.attacks[0]} reads images or rows of tables, and {what}; "
            f"{_NONE_YET}: set adversary.attacks = []"
        )
    for section in ("robustness", "pate", "erm", "service"):
        if getattr(experiment, section) is not None:
            raise ValueError(f"section [{section}] is for images and rows of tables, and {what}")


def refuse_texts(experiment: "Experiment", what: str) -> None:
    """Refuse to look at a run on texts in a way that is for images and rows.

    Args:
        experiment: its settings.
        what: would be done, such as ``audit``.

    Raises:
        InputError: the data are texts.
    """
    if experiment.data.is_text:
        raise InputError(
            f"data.name = {experiment.data.name!r} are texts, and {what} is for images and rows of tables; {_NONE_YET}"
        )
