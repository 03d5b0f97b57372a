"""What was asked on the command line."""

from dataclasses import dataclass

from fedpriv.names import AdjacencyName, CalibrationName, SamplingName, UnitName

__all__ = ["Asked"]


@dataclass(frozen=True)
class Asked:
    """The options as they were given, None where they were not; nothing is checked yet.

    Attributes:
        mechanism: one with noise.
        noise: in its own parameter.
        epsilon: nominal.
        target_epsilon: proven for the whole run.
        participations: of one example or update.
        delta: of (epsilon, delta).
        sampling_rate: share of a client's examples in a batch.
        sampling: how batches are drawn.
        unit: what is protected.
        dimension: numbers in a gradient.
        blocks: parts with a draw of their own.
        calibration: from a nominal epsilon to sigma.
        adjacency: which data sets must look alike.
        ceiling: baselines to compute ceilings for, as numbers or fractions.
    """

    mechanism: str
    noise: float | None
    epsilon: float | None
    target_epsilon: float | None
    participations: int
    delta: float
    sampling_rate: float | None
    sampling: SamplingName | None
    unit: UnitName
    dimension: int | None = None
    blocks: int = 1
    calibration: CalibrationName = "analytic"
    adjacency: AdjacencyName = "replace-one"
    ceiling: list[str] | None = None
