"""From the uploads of a round to the next global state: their mean, with central noise if any, and a step."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.federated import upload_sign, weighted_sum
from fedpriv.core.optimizers import make_optimizer
from fedpriv.core.plan import noise_divisor
from fedpriv.core.randomness import SECRET_BYTES
from fedpriv.core.world import State, World
from fedpriv.gradients import Vector
from fedpriv.server.uploads import Upload, norm

_MARKS = "noise/marks"  # (m, 32), uint8: of the last m rounds, from which their noise is drawn again


class ServerOptimizer:
    """SGD or Adam on the global parameters, by the mean upload (Reddi et al. 2021); at rate 1 plain averaging."""

    def __init__(self, experiment: Experiment, state: State) -> None:
        self._parameters = {name: value.clone() for name, value in state.parameters.items()}
        self._buffers = {name: value.clone() for name, value in state.buffers.items()}
        self.rounds = 0  # that the state has taken part in, counted from when a step begins
        self._sign = upload_sign(experiment.federation.algorithm)
        federation = experiment.federation
        self._optimizer = make_optimizer(
            federation.server_optimizer, experiment.server_learning_rate, federation.server_momentum
        )

    def step(self, mean: State) -> None:
        """Move the global state by the mean upload."""
        self.rounds += 1
        self._optimizer.step(self._parameters, {name: self._sign * value for name, value in mean.parameters.items()})
        for name, value in self._buffers.items():
            value += mean.buffers[name]

    def skip(self) -> None:
        """Count a round that has no upload to move by; the state stays, momentum included."""
        self.rounds += 1

    @property
    def state(self) -> State:
        """The global state; a copy."""
        return State(
            {name: value.clone() for name, value in self._parameters.items()},
            {name: value.clone() for name, value in self._buffers.items()},
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint needs, as named tensors."""
        named = {name: value.clone() for name, value in self._named().items()}
        for slot, values in self._optimizer.memory.items():
            named |= {f"optimizer/{index}/{slot}": value for index, value in enumerate(values)}
        return named

    def load(self, tensors: Mapping[str, Tensor], rounds: int) -> None:
        """Take up what :meth:`tensors` returned after ``rounds`` rounds."""
        self._check(tensors)
        memory = self._memory(tensors)
        self.rounds = rounds
        for name, value in self._named().items():
            value.copy_(tensors[name])
        self._optimizer.memory = memory

    def _named(self) -> dict[str, Tensor]:
        """The global state as a checkpoint names it; no copy."""
        named = {f"parameters/{name}": value for name, value in self._parameters.items()}
        return named | {f"buffers/{name}": value for name, value in self._buffers.items()}

    def _memory(self, tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """What the optimiser remembers of each parameter: of all of them or, before its first step, of none."""
        stored = {key: value for key, value in tensors.items() if key.startswith("optimizer/")}
        if not stored:
            return {}
        memory: dict[str, list[Tensor]] = {slot: [] for slot in self._optimizer.slots}
        for slot, values in memory.items():
            for index, parameter in enumerate(self._parameters.values()):
                name, want = f"optimizer/{index}/{slot}", torch.zeros(()) if slot == "step" else parameter
                values.append(_require_like(name, stored.pop(name, None), want))
        for name in stored:
            raise InputError(f"the checkpoint is not of this optimiser: it holds {name}")
        return memory

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        own = self._named()
        for name, value in own.items():
            _require_like(name, tensors.get(name), value)
        for name in tensors:
            if name not in own and name != _MARKS and not name.startswith("optimizer/"):
                raise InputError(f"the checkpoint is not of this model: it holds {name}")


def _require_like(name: str, given: Tensor | None, want: Tensor) -> Tensor:
    """A checkpoint's tensor, unless it has another shape or type, or no step can be computed with it."""
    if given is None or given.shape != want.shape or given.dtype != want.dtype:
        raise InputError(f"the checkpoint is not of this model: {name} does not fit")
    if not bool(given.isfinite().all()) or (name.endswith("/step") and float(given) < 0):
        raise InputError(f"the checkpoint is damaged: {name} holds what no step leaves behind")
    return given


@dataclass(frozen=True)
class _RoundNoise:
    """The independent noise of one round, and what it is drawn from besides the run's secret."""

    number: int
    mark: bytes
    values: Vector


class CentralNoise:
    """The noise that a trusted server adds to the sum of each round, one round after the other.

    Where it is correlated, a round has noise of its own and shares of that of the rounds before it, which are kept in
    memory; a checkpoint holds what they are drawn from again.
    """

    def __init__(self, world: World) -> None:
        self._world, self._factors = world, world.plans[0].noise_factors
        self._divisor = noise_divisor(world.experiment, world.plans)
        # Of the latest rounds, the latest first: as many as the band, so that the last one may be undone.
        self._earlier: deque[_RoundNoise] = deque(maxlen=len(self._factors) if len(self._factors) > 1 else 0)

    def mean(self, number: int, uploads: Sequence[Upload]) -> State:
        """Return the noisy sum of clipped updates over the public number of clients; the noise is keyed by the sum."""
        world, bound = self._world, self._world.plans[0].config.bound
        total = {name: torch.zeros_like(value, device="cpu") for name, value in world.initial.parameters.items()}
        if uploads:
            factors = [bound / max(norm(upload.state.parameters), bound) for upload in uploads]
            total = weighted_sum([upload.state.parameters for upload in uploads], factors)
        mark = State(total, {}).digest()
        if self._earlier.maxlen:
            mark = world.secret.derived("mark-of-the-sum", number, mark).key  # is kept, and tells nothing of the sum
        fresh = self._drawn(number, mark)
        divisor = world.experiment.federation.asked
        mean = {name: value / divisor + fresh.values[name] for name, value in total.items()}
        for factor, noise in zip(self._factors[1:], self._earlier, strict=False):
            for name, value in mean.items():
                value.add_(noise.values[name], alpha=factor)
        self._earlier.appendleft(fresh)
        buffers = {name: torch.zeros_like(value, device="cpu") for name, value in world.initial.buffers.items()}
        return State(mean, buffers)

    @property
    def kept(self) -> int:
        """How many vectors of noise are in memory."""
        return len(self._earlier)

    def tensors(self, rounds: int) -> dict[str, Tensor]:
        """What a checkpoint after so many rounds needs, as named tensors; a round that failed since is left out."""
        kept = [noise.mark for noise in self._earlier if noise.number <= rounds][: len(self._factors) - 1]
        marks = [torch.frombuffer(bytearray(mark), dtype=torch.uint8) for mark in kept]
        return {_MARKS: torch.stack(marks)} if marks else {}

    def load(self, tensors: Mapping[str, Tensor], rounds: int) -> None:
        """Take up what :meth:`tensors` returned after ``rounds`` rounds, and draw the noise of these once more."""
        kept = min(rounds, len(self._factors) - 1)
        marks = tensors.get(_MARKS, torch.zeros((0, SECRET_BYTES), dtype=torch.uint8))
        if marks.dtype != torch.uint8 or tuple(marks.shape) != (kept, SECRET_BYTES):
            raise InputError(f"the checkpoint is damaged: {_MARKS} is not of the last {kept} rounds")
        self._earlier.clear()
        self._earlier.extend(self._drawn(rounds - back, mark.numpy().tobytes()) for back, mark in enumerate(marks))

    def _drawn(self, number: int, mark: bytes) -> _RoundNoise:
        """The independent noise of a round, on its mean."""
        world = self._world
        deviation = world.plans[0].config.noise_on_mean(0, self._divisor)
        generator = world.secret.stream("noise-on-the-sum", number, mark).numpy()
        values = {
            name: torch.from_numpy(generator.normal(0.0, deviation, tuple(value.shape))).to(value.dtype)
            for name, value in world.initial.parameters.items()
        }
        return _RoundNoise(number, mark, values)
