"""What is found out about a network, as ``fedpriv model --json`` prints it."""

from fedpriv.core.reading import GrowingRecord


class Acceptance(GrowingRecord):
    """Whether the network trains with a mechanism; tried on random examples."""

    mechanism: str
    accepted: bool
    reason: str = ""  # why not
    mixing: tuple[str, ...] = ()  # the layers that mix the examples of a batch
    instead: str = ""  # what to write


class LayerGroup(GrowingRecord):
    """Layers whose names differ in numbers only, and whose gradients are computed the same way."""

    name: str  # with ranges, such as layer{1-4}.conv{1-2}
    kind: str  # their class
    count: int
    parameters: int  # of all of them, those inside included
    way: str  # ghost, dense, frozen or unused
    reason: str = ""  # why dense


class Exactness(GrowingRecord):
    """Largest error of per-example gradients against autograd, one example at a time, on random examples."""

    error: float  # of norms, inner products, a weighted sum, and that sum of each parameter; the largest, relative
    examples: int
    precision: str  # float64, or float32 where the network takes no other
    layer: str  # whose sum is the furthest off
    rounding: float | None = None  # the same for autograd with weights off by a rounding, where the error is not tiny


class StepCost(GrowingRecord):
    """A private step next to one of plain SGD: medians of CPU time, and the highest memory of the process."""

    batch: int
    rounds: int  # in which both took a step
    times: float  # CPU time of the private step over SGD's
    sgd_ms: float
    private_ms: float
    memory_times: float | None  # memory of the private step over SGD's; `None`: the system does not tell
    sgd_mib: float | None  # parameters, batch and what a step adds at most
    private_mib: float | None


class AttackTrial(GrowingRecord):
    """One step of an attack on an upload of random examples without a mechanism."""

    name: str
    runs: bool
    reason: str = ""  # why it refuses


class Diagnosis(GrowingRecord):
    """All of it; a part that could not be measured is ``None``, and ``unmeasured`` says why."""

    model: str
    takes: str  # what an example is
    shape: tuple[int, ...]  # (C, H, W), or (T,) of texts
    classes: int
    trained: int  # parameters
    frozen: int
    acceptance: Acceptance
    way: str = ""  # why the whole network is dense; empty: layer by layer
    layers: tuple[LayerGroup, ...] = ()
    exactness: Exactness | None = None
    cost: StepCost | None = None
    unmeasured: str = ""
    attacks: tuple[AttackTrial, ...] = ()
    warnings: tuple[str, ...] = ()  # what makes attacks mean less than it seems
