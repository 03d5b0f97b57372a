"""How long the report about many trials takes, and how large it is.

The records are synthetic: five kinds of mechanism on two networks, every trial a setting of its own, which is the most
that has to be drawn and written.
"""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure import options, save, seconds
from fedpriv.attacks.membership.report import MembershipFigures
from fedpriv.sweep.page import write_comparison
from fedpriv.sweep.record import ReconstructionPart, TrialRecord
from studies.arguments import whole

KINDS = (("none", None), ("gaussian", None), ("vmf", "whole"), ("vmf", "layer"), ("vmf", "size:16"))
MODELS = ("lenet", "mlp")
# How far below the strongest one each attack is.
MEMBERSHIPS = {"attack-p": 0.05, "attack-r": 0.02, "lira-online": 0.0, "lira-offline": 0.03, "rmia-online": 0.01}


def main() -> None:
    """Measure and print."""
    parser = options("comparison", __doc__)
    parser.add_argument("--trials", type=whole(1), default=1000)
    with parser.parsed() as asked, tempfile.TemporaryDirectory() as folder:
        records = synthetic_records(asked.trials)
        path = Path(folder) / "report.html"
        write_comparison(records[:10], path, title="warm-up")
        taken = seconds(lambda: write_comparison(records, path, title="benchmark"))
        size = path.stat().st_size
        print(f"{asked.trials} trials: {taken:.2f} s, {size / 1e6:.2f} MB")
        save(asked.json, trials=asked.trials, seconds=taken, bytes=size)


def synthetic_records(count: int, seeds: int = 1) -> list[TrialRecord]:
    """Records with every kind of figure, ``seeds`` of each setting; a function of the arguments alone."""
    rng = np.random.default_rng(0)
    return [_record(number, (number - 1) // seeds, rng) for number in range(1, count + 1)]


def _record(number: int, setting: int, rng: np.random.Generator) -> TrialRecord:
    mechanism, blocks = KINDS[setting % len(KINDS)]
    accuracy, auc, mse, epsilon = (float(value) for value in rng.uniform((0.1, 0.45, 0.01, 0.5), (0.9, 0.8, 0.4, 1e3)))
    proven = None if mechanism == "none" else epsilon
    return TrialRecord(
        trial=number,
        folder=f"trials/{number:04d}",
        status="completed",
        settings={"mechanism.name": mechanism, "training.learning_rate": 10.0 ** -(setting % 3), "step": setting},
        seed=number,
        data="fashion-mnist",
        model=MODELS[setting // len(KINDS) % len(MODELS)],
        mechanism=mechanism,
        blocks=blocks,
        draws=8 if blocks else None,
        noise=proven,
        accuracy=accuracy,
        accuracy_low=accuracy - 0.01,
        accuracy_high=accuracy + 0.01,
        epsilon=proven,
        delta=1e-5,
        nominal_epsilon=proven,
        pure_epsilon=proven,
        adjacency="replace-one",
        reconstructions=_reconstructions("unprotected" if mechanism == "none" else "protected", mse),
        memberships=tuple(_membership(name, auc - gap) for name, gap in MEMBERSHIPS.items()),
        epsilon_bound=0.1,
        bound_confidence=0.95,
        seconds=1.0,
    )


def _reconstructions(upload: str, mse: float) -> tuple[ReconstructionPart, ...]:
    attack = ReconstructionPart(
        attack="iga", upload=upload, victims=4, recovered=1, mse=mse, mse_low=mse / 2, mse_high=2 * mse, psnr=12.0
    )
    return attack, ReconstructionPart(attack="guess-mean", upload="none", victims=4, recovered=0, mse=0.08)


def _membership(name: str, auc: float) -> MembershipFigures:
    return MembershipFigures(
        attack=name, auc=auc, auc_low=auc - 0.02, auc_high=auc + 0.02, tpr_at_1_percent=0.05, tpr_at_01_percent=0.01
    )


if __name__ == "__main__":
    main()
