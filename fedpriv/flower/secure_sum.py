"""Noise in the sum: a client's share of Skellam noise in a reply that Flower's SecAgg+ masks.

Inside ``secaggplus_mod`` a reply is clipped to +-clipping_range, rounded at random to a grid, and masked. Here update
and noise are whole multiples of that grid, so that its rounding does nothing: the server's sum is that of parameters
everybody knows, rounded updates and Skellam numbers, which ``fedpriv.accounting.skellam`` covers. Clipping is no
function of the sum: parameters stay so far inside the range that the noise passes it with probability ``PASSES`` at
most, which delta has a part for.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Context
from flwr.client.mod import secaggplus_mod

from fedpriv.accounting.skellam import DELTA_PART, LEVELS, rounded_norm
from fedpriv.core.errors import RefusedError
from fedpriv.core.plan import Plan
from fedpriv.core.randomness import NoiseStream
from fedpriv.core.records import LedgerLine
from fedpriv.flower.arrays import Form, WrongAppError
from fedpriv.flower.watch import frames
from fedpriv.gradients import Vector
from fedpriv.mechanisms.machinery.quantisation import noisy_levels
from fedpriv.mechanisms.machinery.whole_numbers import flat, split

PASSES = 1e-30
"""The chance that any number of any client in a sum passes SecAgg+'s clipping range."""

_STATE = "secaggplus_state"
_EXACT = 1 << 24  # whole numbers up to here are exact in float32
ASSUMED = (
    "of the sum only: assumed are a server that follows SecAgg+, masks that hide all but the sum, which Flower draws, "
    "and in each sum {} clients who add their noise"
)


@dataclass(frozen=True)
class Protocol:
    """What the server told a client about SecAgg+ at the beginning of a round."""

    clients: int  # in the round
    neighbours: int  # with whom a client shares its keys, itself included
    threshold: int  # of them that must answer
    limit: float  # what parameters are clipped to
    levels: int  # of the grid from -limit to limit
    weight: float  # of a reply that counts in full

    @property
    def step(self) -> float:
        """The distance of two levels."""
        return 2 * self.limit / self.levels

    @property
    def least(self) -> int:
        """The number of clients that every sum has: the threshold in each of as many disjoint neighbourhoods."""
        width = self.clients if self.neighbours >= self.clients else 2 * (self.neighbours // 2) + 1
        return max(1, self.clients // width) * self.threshold

    def rounded(self, values: Vector) -> Vector:
        """Arrays on the grid, in their own types; whole numbers are on it."""
        return {
            name: (torch.round(value.double() / self.step) * self.step).to(value.dtype)
            for name, value in values.items()
        }


def protocol_of(context: Context) -> Protocol:
    """Return what SecAgg+ does with this reply; refuse where no ``secaggplus_mod`` masks it."""
    state: Mapping[str, Any] = context.state.config_records.get(_STATE, {})
    masked = any(frame.f_code is secaggplus_mod.__code__ for frame in frames())
    if not masked or "threshold" not in state:
        raise WrongAppError(
            "mechanism distributed: a reply alone has a share of the noise; it leaves under Flower's secure "
            "aggregation only: mods=[secaggplus_mod, privatise(__file__)], with SecAggPlusWorkflow at the server"
        )
    return Protocol(
        clients=int(state["sample_num"]),
        neighbours=int(state["share_num"]),
        threshold=int(state["threshold"]),
        limit=float(state["clipping_range"]),
        levels=int(state["target_range"]),
        weight=float(state["max_weight"]),
    )


def check_protocol(protocol: Protocol, plan: Plan, before: Vector, noisy: Iterable[str], form: Form) -> None:
    """Refuse what the ledger would not be true of; all of it is known to the server."""
    share, step = plan.share_of_noise, protocol.step
    if protocol.least < share.survivors:
        raise WrongAppError(
            key="mechanism.survivors",
            given=share.survivors,
            allowed=f"at most {protocol.least}: so many clients SecAgg+ needs in a sum (num_shares, "
            "reconstruction_threshold of SecAggPlusWorkflow)",
        )
    if not (math.frexp(step)[0] == 0.5 and protocol.levels % 2 == 0 and protocol.levels <= _EXACT):
        raise WrongAppError(
            f"SecAggPlusWorkflow(clipping_range={protocol.limit:g}, quantization_range={protocol.levels}) rounds to "
            "what float32 does not hold; allowed are powers of two, of quantization_range up to 2**24"
        )
    if protocol.weight != round(protocol.weight):
        raise WrongAppError(f"SecAggPlusWorkflow(max_weight={protocol.weight:g}): allowed is a whole number")
    if not (share.bound / (LEVELS * step)).is_integer():
        allowed = f"a multiple of {LEVELS * step:g}, which is {LEVELS:,} levels of SecAgg+'s clipping range"
        raise WrongAppError(key="mechanism.clip_norm", given=share.bound, allowed=allowed)
    if wrong := [name for name, value in before.items() if value.dtype in (torch.float16, torch.bfloat16)]:
        raise WrongAppError(f"{wrong[0]} is {before[wrong[0]].dtype}: noise in the sum needs float32 or float64")
    if single := [name for name in noisy if not before[name].shape]:
        raise WrongAppError(
            f"{single[0]} has no dimensions, and SecAgg+'s mean of such arrays is wrong (flwr 1.42); allowed is a "
            "parameter of the shape (1,)"
        )
    numbers = sum(plan.tensors)
    reach = share.bound / LEVELS * (rounded_norm(numbers) + _farthest(share.variance, protocol.clients * numbers))
    start = [before[name] for name in noisy if form == "weights" and before[name].numel()]
    largest = max((float(value.abs().max()) for value in start), default=0.0)
    if not largest + reach + step < protocol.limit:
        raise WrongAppError(
            f"SecAggPlusWorkflow(clipping_range={protocol.limit:g}): parameters up to {largest:.3g} with updates and "
            f"noise up to {reach:.3g} pass it; allowed is a larger range, or a smaller clip_norm"
        )


def _farthest(variance: float, numbers: int) -> float:
    """What none of so many Skellam numbers exceeds but with probability ``PASSES``, by Bennett's inequality."""
    chance = math.log(2 * numbers / PASSES)
    return chance / 3 + math.sqrt((chance / 3) ** 2 + 2 * chance * variance)


def check_claim(line: LedgerLine) -> None:
    """Refuse a claim whose delta has no room for replies that are clipped after their noise."""
    passes = (1 + math.exp(min(line.epsilon or math.inf, 700.0))) * line.participations * PASSES
    if passes > DELTA_PART * line.delta:
        raise RefusedError(
            f"client {line.client}: this answer would make epsilon {line.epsilon or math.inf:.3g}; noise in the sum "
            f"proves none above {math.log(DELTA_PART * line.delta / PASSES):.0f}; allowed is more noise"
        )


def share_of(plan: Plan, update: Vector, noise: NoiseStream) -> Vector:
    """Return an update, clipped and rounded, with the client's share of the noise, in float64 on the grid."""
    share = plan.share_of_noise
    values = flat(plan.release_update(update, noise)) / share.bound
    words = noisy_levels((values / max(1.0, float(values.norm()))).numpy(), share.variance, noise.numpy())
    like = {name: value.double() for name, value in update.items()}
    return split(torch.from_numpy(words).double() * (share.bound / LEVELS), like)
