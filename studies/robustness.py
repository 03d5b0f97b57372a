"""Certified accuracy on MNIST, by each theorem: ``python -m studies robustness sweeps/certificates``.

It is read from the folder of the sweep ``configs/sweeps/certificates.toml``: a few lines for each of its trials, and
for each bound the shares that are proven at the sizes of ``docs/certificates.md``, in l2 and then in linf.
"""

from pathlib import Path

from fedpriv.core.errors import InputError
from fedpriv.core.runs import RunFolder
from fedpriv.robustness.records import Robustness
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.settings import plain_settings
from studies.arguments import StudyParser

BOUNDS = ("main", "renyi", "analytic", "classic", "extended", "paper")


def main() -> None:
    """Print what each trial certifies."""
    parser = StudyParser("studies.robustness", __doc__)
    parser.add_argument("folder", type=Path)
    with parser.parsed() as asked:
        for record in SweepFolder.open(asked.folder).records():
            result = RunFolder.open(asked.folder / record.folder).read(Robustness)
            if result is None:
                raise InputError(f"{asked.folder / record.folder} has no certificates")
            _print(plain_settings(record.settings), result)


def _print(row: str, result: Robustness) -> None:
    print(f"{row}: voted {result.voted.value:.3f}, noiseless {result.noiseless.value:.3f}, {result.seconds:.0f} s")
    radii = {radius.bound: radius for radius in result.radii}
    for bound in BOUNDS:
        shares = [f"{share.value:.3f}" for norm in ("l2", "linf") for share in result.curve(norm, bound).shares]
        print(f"  {bound:9}", *shares, f"mean {radii[bound].l2:.3f} {radii[bound].linf:.4f}", flush=True)


if __name__ == "__main__":
    main()
