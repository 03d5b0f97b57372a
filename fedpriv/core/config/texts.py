"""What experiments on texts cannot ask for: parts that look at pictures or rows of tables; and the other way round."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedpriv.core.errors import InputError
from fedpriv.core.registry import ATTACKS, DATASETS
from fedpriv.core.sections import given_sections

if TYPE_CHECKING:
    from fedpriv.core.config.experiment import Experiment


def text_attacks() -> tuple[str, ...]:
    """The attacks that read texts."""
    return tuple(name for name, attack in ATTACKS.items() if attack.is_text)


def text_sets() -> tuple[str, ...]:
    """The data sets that are texts."""
    return tuple(name for name, source in DATASETS.items() if source.is_text)


def without_attacks(tree: Any) -> Any:
    """Return settings in which nothing attacks texts, unless they name an attack: that is refused afterwards."""
    data = tree.get("data") if isinstance(tree, Mapping) else None
    if not isinstance(data, Mapping) or not (data.get("name") in text_sets() or data.get("text")):
        return tree
    adversary = tree.get("adversary", {})
    if not isinstance(adversary, Mapping):
        return tree
    return {**tree, "adversary": {"attacks": [], **adversary}}


def check_texts(experiment: "Experiment") -> None:
    """Refuse what is for images or rows, where the data are texts; and attacks on texts, where they are not."""
    for name in experiment.adversary.attacks:
        if reason := unsuited(experiment, name):
            raise InputError(f"adversary.attacks: {reason}")
    if not experiment.data.is_text:
        return
    what = f"data.name = {experiment.data.name!r} are texts"
    for name, section in given_sections(experiment).items():
        if not section.reads_texts:
            raise InputError(f"section [{name}] is for images and rows of tables, and {what}")


def unsuited(experiment: "Experiment", attack: str) -> str | None:
    """Say why an attack does not read such data, or return ``None``."""
    reads_texts, data = bool(ATTACKS[attack].is_text), experiment.data
    if reads_texts == data.is_text:
        return None
    if data.is_text:
        known = ", ".join(text_attacks())
        return f"{attack} reads images or rows of tables, and data.name = {data.name!r} are texts; allowed: {known}"
    return f"{attack} reads texts, and data.name = {data.name!r} are none; allowed: {', '.join(text_sets())}"


def refuse_texts(experiment: "Experiment", what: str) -> None:
    """Refuse to look at a run on texts in a way that is for images and rows."""
    if experiment.data.is_text:
        raise InputError(f"data.name = {experiment.data.name!r} are texts, and {what} is for images and rows of tables")
