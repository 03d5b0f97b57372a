"""The table of docs/trust.md from a sweep of configs/sweeps/trust.toml: ``python -m studies trust DIR``."""

from collections import defaultdict
from pathlib import Path

from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.records import Summary
from fedpriv.core.runs import RunFolder
from fedpriv.sweep.folder import SweepFolder
from studies.arguments import StudyParser
from studies.results import Table, student


def main() -> None:
    """Print one row for each place of the noise and listener, all seeds together."""
    parser = StudyParser("studies.trust", __doc__)
    parser.add_argument("folder", type=Path)
    with parser.parsed() as asked:
        print(_table(asked.folder), end="")


def _table(path: Path) -> Table:
    rows: dict[tuple[str, str], list[Summary]] = defaultdict(list)
    for record in SweepFolder.open(path).records():
        folder = RunFolder.open(path / record.folder)
        experiment, summary = folder.experiment(), folder.summary()
        if summary is None or record.failed:
            raise InputError(f"{record.folder} is not completed")
        rows[_noise(experiment), experiment.adversary.threat_model].append(summary)
    if not rows:
        raise InputError(f"{path} has no trials")
    cells = [
        (
            *key,
            student([summary.test_accuracy for summary in summaries]),
            _rate(summaries, "recovered"),
            _rate(summaries, "identified"),
        )
        for key, summaries in rows.items()
    ]
    return Table(("noise", "who listens", "test accuracy", "recovered", "picked out of 100"), cells)


def _noise(experiment: Experiment) -> str:
    """The mechanism, and with how many clients' shares its noise is whole."""
    mechanism, asked = experiment.mechanism, experiment.federation.asked
    survivors = mechanism.shared_by(asked).least_in_sum
    return f"{mechanism.name}, {survivors} of {asked} survivors" if survivors else mechanism.name


def _rate(summaries: list[Summary], what: str) -> str:
    """How many images of all seeds together, with Wilson's 95 % interval."""
    made = [attack for summary in summaries for attack in summary.attacks if attack.upload == "protected"]
    if not made:
        raise InputError("a trial has no attack on protected uploads, as those of configs/sweeps/trust.toml")
    hits, images = sum(getattr(attack, what) for attack in made), sum(attack.victims for attack in made)
    rate = rate_interval(hits, images)
    return f"{hits} of {images} [{rate.low:.0%}, {rate.high:.0%}]"


if __name__ == "__main__":
    main()
