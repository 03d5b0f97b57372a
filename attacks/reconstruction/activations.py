"""Inputs of a convolution from the gradients of weights: in closed form, then by recursion."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.scene import Scene, time_is_up
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import copied, until_the_end

# What a convolution got of each example, from the gradients of weights alone, up to a factor.
#
# The gradient of a convolution with fewer positions than channels, those of all examples together, has a rank of as
# many as there are positions, and its rows span the patches of the inputs. Patches overlap, and those at the border
# hold zeros: with a stride of 1, the inputs and their sums alone fit. Inputs that a ReLU gave have many zeros and
# nothing negative, which sums with weights of both signs have not: that tells the examples apart. With a larger stride
# the inputs' shifts fit too. Which of their sums it was, the input of the next convolution tells, since normalisation
# and bias change a channel by a factor and a summand, and ReLU leaves what is positive. All parts of an image of some
# patches' size that fit are found from those of half the size, where two agree, as eigenvectors: no other fits.


RANK = 1e-4  # of the least singular value of the patches: what is below comes from rounding
FITS = 1e-4  # share of an input's patches that may lie outside their span
APART = 1e-3  # the best of all sums explains so much better than the next
TOO_MANY = 4  # parts of images for each position: what is known of them is too little
MOST = 256  # positions of an example
TURNS, DRAWS = 20, 200  # of the search for zeros, and its starts in each
SPARSER, NUMBERS = 30, 1000  # its steps, and how many numbers it looks at
POWER = 0.5  # of absolute values, whose sum it makes small
ZERO, NEARLY = 1e-3, 1e-2  # of the root mean square: what counts as zero to the search, and in the end
NEAR = (0.1, 0.03, 0.01, 0.001)  # the same where it is known but for a little
BELOW = 1e-3  # of the largest number: what is negative by less comes from rounding
MANY = 0.75  # of the zeros of what has most of them
SAME = 0.999  # cosine of what two starts found that is one input
POSITIVE = 1e-3  # of the largest number: what is above did pass a ReLU


@dataclass(frozen=True, eq=False)
class Activation:
    """What a convolution got of each example, each up to a factor, in any order."""

    layer: str  # its name
    values: Tensor  # (B, C, H, W), float64 on the CPU

    @property
    def apart(self) -> Tensor:
        """The share of the squares (B,) that is not that of the channels' means."""
        differences = self.values - self.values.mean(dim=(2, 3), keepdim=True)
        return differences.flatten(1).square().sum(dim=1) / self.values.flatten(1).square().sum(dim=1)


@dataclass(frozen=True, eq=False)
class Features:
    """What the last layer got."""

    layer: str  # its name in the network
    values: Tensor  # (B, F), float64 on the CPU
    labels: Tensor  # int64 (B,), each its example's
    misfit: float  # the share of the squared gradient that they leave


@dataclass(frozen=True, eq=False)
class _Called:
    """A convolution as the network calls it."""

    examples: int
    name: str
    layer: Any
    given: torch.Size  # (C, H, W)
    made: torch.Size
    gradient: Tensor


def read_activation(scene: Scene, victim: Victim) -> Activation | None:
    """Return what the first convolution got of which that can be told; ``None``: of none."""
    if victim.model.training is not None or max(victim.noise.variances, default=0.0) or victim.pool:
        return None
    calls = _calls(scene, victim)
    for number, call in enumerate(calls):
        found = _inputs(call)
        if found is not None and max(call.layer.stride) > 1:
            found = _chosen(call, found, calls[number + 1 :])
        if found is not None:
            return Activation(call.name, found)
    return None


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is a convolution of one group whose border holds zeros."""
    plain = type(layer) is nn.Conv2d and layer.groups == 1
    return plain and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _patches(layer: Any) -> dict[str, Any]:
    """How a convolution cuts its input into patches, as folding takes it."""
    return {name: getattr(layer, name) for name in ("kernel_size", "dilation", "padding", "stride")}


def _calls(scene: Scene, victim: Victim) -> list[_Called]:
    """The convolutions with overlapping patches, in the order of their calls."""
    calls: list[_Called] = []

    def write(name: str, layer: nn.Conv2d, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        gradient = victim.gradient[f"{name}.weight"]
        calls.append(_Called(victim.model.examples, name, layer, inputs[0].shape[1:], output.shape[1:], gradient))

    handles = [
        layer.register_forward_hook(partial(write, name))
        for name, layer in scene.network.model.named_modules()
        if _is_plain(layer) and f"{name}.weight" in victim.gradient
        if all(size > step for size, step in zip(layer.kernel_size, layer.stride, strict=True))
    ]
    with until_the_end(handles), torch.no_grad():
        scene.network.logits(victim.parameters, torch.zeros(1, *scene.shape).to(scene.mean))
    return calls


def _inputs(call: _Called) -> Tensor | None:
    """The inputs (B, C, H, W) whose patches the gradient's rows span; with a stride, a basis of those that do."""
    matrix, positions = call.gradient.flatten(1).cpu().double(), call.made[1:].numel()
    rank = call.examples * positions
    if not 1 < positions <= MOST or rank >= min(matrix.shape):
        return None
    _, values, rows = torch.linalg.svd(matrix, full_matrices=False)
    if values[rank] > RANK * values[rank - 1]:
        return None
    images = _assembled(rows[:rank], call)
    if images is None or max(call.layer.stride) > 1:
        return images
    if len(images) != call.examples:
        return None
    return images if call.examples == 1 else _told_apart(images)


def _assembled(span: Tensor, call: _Called) -> Tensor | None:
    """An orthonormal basis (n, C, H, W) of the images whose patches are in a span, put together from larger parts."""
    cut = {name: getattr(call.layer, name) for name in ("kernel_size", "dilation")}
    sides = tuple(step * (size - 1) + 1 for size, step in zip(*cut.values(), strict=True))
    parts = F.fold(span[:, :, None], sides, **cut)
    times = F.fold(torch.ones_like(span[:1, : math.prod(call.layer.kernel_size), None]), sides, **cut)
    reached = [1, 1]
    for _ in range(sum(math.ceil(math.log2(count)) for count in call.made[1:])):
        axis = min((0, 1), key=lambda axis: (reached[axis] == call.made[1:][axis], reached[axis]))
        more = min(reached[axis], call.made[1:][axis] - reached[axis])
        reached[axis] += more
        parts, times = _joined(parts, times, 2 + axis, more * call.layer.stride[axis])
        if not 0 < len(parts) < TOO_MANY * len(span):
            return None
    (top, left), (height, width) = call.layer.padding, parts.shape[2:]
    inside = F.pad(parts, (-left, call.given[2] + left - width, -top, call.given[1] + top - height))
    flat = inside.flatten(1)
    beyond, mixings = torch.linalg.eigh(torch.eye(len(flat)).to(flat) - flat @ flat.mT)
    fitting = mixings[:, beyond < FITS].mT @ flat
    return fitting.unflatten(1, call.given) if len(fitting) else None


def _joined(parts: Tensor, times: Tensor, axis: int, shift: int) -> tuple[Tensor, Tensor]:
    """The images of two parts each, one beside the other, that agree where both have been: orthonormal."""
    ahead, behind = ([shift, 0], [0, shift])
    pads = [[0, 0, *way] if axis == 2 else way for way in (behind, ahead)]
    counts = [F.pad(times, pad) for pad in pads]
    total = counts[0] + counts[1]
    both = (counts[0] > 0) & (counts[1] > 0)
    first, second = (F.pad(parts, pad) for pad in pads)
    shared = torch.cat([first[:, :, both[0, 0]], -second[:, :, both[0, 0]]]).flatten(1)
    misfits, mixings = torch.linalg.eigh(shared @ shared.mT)
    kept = mixings[:, misfits < FITS].mT
    weights = [count / total.clamp(min=1) for count in counts]
    made = kept[:, : len(parts)] @ (first * weights[0]).flatten(1)
    made += kept[:, len(parts) :] @ (second * weights[1]).flatten(1)
    squares, turned = torch.linalg.eigh(made @ made.mT)
    made = (turned / squares.clamp(min=1e-30).sqrt()).mT @ made
    return made.unflatten(1, first.shape[1:]), total


def _told_apart(images: Tensor) -> Tensor | None:
    """What a ReLU gave, of whose sums (B, C, H, W) are a basis, in any order; ``None``: the zeros do not tell."""
    basis = torch.linalg.qr(images.flatten(1).mT).Q
    basis = basis / basis.square().mean().sqrt()
    generator = torch.Generator().manual_seed(START)
    found = basis.new_zeros(0, len(basis))
    for _ in range(TURNS):
        for made in _sparse(basis, generator):
            if not bool((found @ made > SAME).any()):
                found = torch.cat([found, made[None]])
        # Sums that are nowhere negative by chance have zeros where several examples have, which are fewer.
        zeros = (found < BELOW * found.amax(dim=1, keepdim=True)).sum(dim=1)
        found = found[zeros > MANY * zeros.max()] if len(found) else found
        if len(found) >= len(images):
            break
    return _cleaned(found.view_as(images)) if len(found) == len(images) else None


def _cleaned(images: Tensor) -> Tensor:
    """The sums of what a ReLU gave (B, C, H, W) that are zero where each nearly is; the same if it was no ReLU."""
    basis = torch.linalg.qr(images.flatten(1).mT).Q
    basis = basis / basis.square().mean().sqrt()
    values = F.normalize(images.flatten(1)) * math.sqrt(len(basis))
    for zero in NEAR:
        values = _zeroed(basis, values, zero)
    values = values * values.sum(dim=1, keepdim=True).sign()
    return values.view_as(images) if bool((values.amin(dim=1) > -BELOW * values.amax(dim=1)).all()) else images


def _sparse(basis: Tensor, generator: torch.Generator) -> Tensor:
    """Sums of the columns of a basis (P, B) with many zeros and nothing negative: (n, P), of length 1."""
    some = basis[torch.randperm(len(basis), generator=generator)[:NUMBERS]]
    mixings = torch.randn(DRAWS, basis.shape[1], dtype=basis.dtype, generator=generator)
    mixings = mixings / mixings.norm(dim=1, keepdim=True)
    for step in range(SPARSER):  # least squares, with weights that become those of the power
        least = ZERO ** (step / (SPARSER - 1))
        mixings = _least(some, ((mixings @ some.mT).square() + least**2) ** (POWER / 2 - 1))
    made = _zeroed(basis, mixings @ basis.mT, NEARLY)
    made = made * made.sum(dim=1, keepdim=True).sign()
    made = made[made.min(dim=1).values > -BELOW * made.max(dim=1).values]
    return made / made.norm(dim=1, keepdim=True)


def _zeroed(basis: Tensor, values: Tensor, zero: float) -> Tensor:
    """The sums of the columns of a basis (P, B) that are least where values (n, P) are nearly zero."""
    return _least(basis, (values.abs() < zero).double()) @ basis.mT


def _least(basis: Tensor, weights: Tensor) -> Tensor:
    """The weights of columns (n, B), of length 1, whose sums have the least squares, given weights of squares."""
    return torch.linalg.eigh((weights[:, None] * basis.mT) @ basis).eigenvectors[:, :, 0]


def _chosen(call: _Called, basis: Tensor, later: Sequence[_Called]) -> Tensor | None:
    """The sums (B, C, H, W) of a basis that the inputs of the next convolution go with."""
    if len(basis) == 1:
        return _cleaned(basis) if call.examples == 1 else None
    following = next((other for other in later if other.given == call.made), None)
    found = None if following is None or max(following.layer.stride) > 1 else _inputs(following)
    if found is None:
        return None
    made = F.conv2d(basis, call.layer.weight.cpu().double(), None, call.layer.stride, call.layer.padding)
    chosen = [_goes_with(each, made) for each in found]
    if any(mixing is None for mixing in chosen):
        return None
    mixings = torch.stack([mixing for mixing in chosen if mixing is not None])
    return _cleaned(torch.einsum("bk,kchw->bchw", mixings, basis))


def _goes_with(found: Tensor, made: Tensor) -> Tensor | None:
    """The weights (K,) with which a convolution's results (K, C, H, W) become the next one's input (C, H, W)."""
    wanted = (found * found.sum().sign()).flatten(1)[:, :, None]  # (channels, positions, 1)
    passed = (wanted > POSITIVE * wanted.max()).double()
    made = made.flatten(2).permute(1, 2, 0) * passed
    # What a factor and a summand for each channel explain is taken off; the rest is zero for the sum in question.
    known = torch.cat([wanted * passed, passed], dim=2)
    along = known.mT @ made
    left = (made.mT @ made - along.mT @ torch.linalg.pinv(known.mT @ known, hermitian=True) @ along).sum(dim=0)
    misfits, mixings = torch.linalg.eigh(left)
    return None if misfits[0] > APART * misfits[1] else mixings[:, 0]


# What earlier convolutions got, once a later one's input is known, layer by layer (R-GAP: Zhu and Blaschko 2021). The
# unknowns of a layer are all examples' at once.
#
# From what a ReLU gave, the loss's derivative by what it got follows, as all behind it can be run. The gradient of a
# convolution before it is then linear in what that convolution got, but for the GroupNorm between them, whose
# derivative depends a little on it: solving again and again converges. A ReLU that is misjudged spoils all before it,
# but the gradient of the bias before it shows that, and which numbers explain it. Where convolutions with a stride
# leave the equations of a single example weak, what the norms gave, as far as ReLUs let it through, completes them.


START = 20261130  # the seed of first guesses
ROUNDS = 30  # of solving linear equations, at most
SLOWER, PATIENCE = 0.9, 2  # of the misfit so many rounds before: a round that leaves more is the last
REMEMBERED = 5  # rounds whose changes tell the next
RIDGE = 1e-2  # of the equations' mean square at the start; as the misfit falls, its square
MOST_PLACES = 1024  # of a channel: its equations are solved at once
NOISE = 1.5  # times the largest that is negative: what is above did pass a ReLU
LEAST = 4.0  # deviations that the largest noise has
MET, CLEAR = 1e-4, 1e-2  # misfit of equations that tell everything, and of those that tell enough where none is refined
ROUGH = 0.1  # misfit from which it is worth to go on
CLOSE = 0.03  # misfit with which an input is of use still
FARTHER, SECANTS = 0.01, 4  # change of a factor at first, and how often it is changed
TELLING = 0.01  # share of the gradient that changes with a factor, at least, to tell it
TURNS_OF_EACH = 6  # in which factors are fitted, and then what passed a ReLU put right
DOUBTFUL, MOST_DOUBTFUL = 2.0, 10  # times what is above noise: below it may not have passed; so many of a channel
OUTLYING = 100  # times the typical residual: what shows a mistake
EXPLAINS = (10, 3)  # times the same: what one number, or two, may leave
TOLD = 1e-12  # share of a bias's squared gradient that has to change with a factor to tell it
REFINED, CONJUGATE = 3, 40  # steps of Gauss-Newton, and of conjugate gradients in each


@dataclass(frozen=True, eq=False)
class _Part:
    """A convolution whose input is looked for, what is known of it, and all between it and the next ReLU."""

    layer: Any
    norm: nn.Module
    error: Tensor  # the loss's derivative by what the norm gives
    gradient: Tensor  # the kernels'
    rest: Tensor  # what is added to what the norm gives
    wanted: Tensor  # what the ReLU makes of both

    def _errors(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The derivative by what the convolution gives, and what the norm gives."""
        given, pull, *_ = torch.func.vjp(self.norm, nn.Conv2d.forward(self.layer, inputs))
        return pull(self.error)[0], given

    def equations(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The normal equations of a channel's places: products (places, places), and what is wanted (B, C, H, W)."""
        error, size, count = self._errors(inputs)[0], inputs.shape[2:], inputs[:, 0].numel()
        places = torch.arange(1, count + 1, dtype=inputs.dtype).view(-1, 1, *size)
        patches = F.unfold(places, **_patches(self.layer)).long()  # 0: beyond the border
        between, products = _by_channel(error).mT @ _by_channel(error), inputs.new_zeros(2 * (1 + count,))
        for reached in patches.transpose(0, 1).flatten(1):
            products[reached[:, None], reached] += between
        made = error.flatten(2).mT @ self.gradient.flatten(1)
        return products[1:, 1:], F.fold(made.mT, size, **_patches(self.layer))

    def left(self, before: Tensor, inputs: Tensor) -> Tensor:
        """What these inputs leave of the gradient, of derivatives with those before: of the gradient's shape."""
        return self._made(self._errors(before)[0], inputs) - self.gradient

    def _made(self, errors: Tensor, inputs: Tensor) -> Tensor:
        """The kernels' gradient of such derivatives and inputs."""
        made = errors.flatten(2) @ F.unfold(inputs, **_patches(self.layer)).mT
        return made.sum(dim=0).view_as(self.gradient)

    def misfits(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Of the gradient and of what the ReLU gives (or gets, where it lets that through), by their lengths."""
        errors, given = self._errors(inputs)
        passed = torch.where(self.wanted > 0, given + self.rest, (given + self.rest).relu())
        left = self._made(errors, inputs) - self.gradient
        return left / self.gradient.norm(), (passed - self.wanted) / self.wanted.norm()


@dataclass(eq=False)
class _Run:
    """What was seen of one run of the network."""

    fed: dict[str, int] = field(default_factory=dict)  # convolution -> the number of the ReLU whose result it got
    # convolution -> the norm behind it, what that gave, and the number of the next ReLU
    made: dict[str, tuple[nn.Module, Tensor, int]] = field(default_factory=dict)
    relus: list[tuple[str, Tensor]] = field(default_factory=list)  # the last bias before each, and what it got
    sources: dict[int, tuple[Any, Tensor]] = field(default_factory=dict)  # by ids: who made a tensor, and itself
    direct: list[bool] = field(default_factory=list)  # whether each got what a norm gave, with nothing added
    bias: str = ""
    last: Any = None  # what the last layer got
    logits: Any = None
    given: list[Tensor] = field(default_factory=list)  # what each ReLU gave


class _Replay:
    """The network in float64, with what is known in place of what its ReLUs give."""

    def __init__(self, scene: Scene, victim: Victim, features: Features) -> None:
        self.model = copied(scene.network.model).cpu().double()
        self.model.load_state_dict(dict(victim.parameters), strict=False)
        for name, layer in self.model.named_modules():
            if isinstance(layer, nn.ReLU):
                layer.inplace = False
            if _is_plain(layer):
                layer.forward = partial(self._convolved, name, layer)
        self.gradient = {name: value.cpu().double() for name, value in victim.gradient.items()}
        self.known: dict[int, Tensor] = {}
        self._after: dict[str, int] = {}  # convolution -> the number of the next ReLU
        self._losses, self._shape = scene.network.losses, (len(features.values), *scene.shape)
        self._output, self._wanted = features.layer, features.values
        self._one_hot = F.one_hot(features.labels.cpu(), scene.classes).double()

    def run(self) -> tuple[_Run, Tensor]:
        """Return what was seen, and the loss."""
        run = _Run()
        layers = [
            (name, layer)
            for name, layer in self.model.named_modules()
            if isinstance(layer, (nn.Conv2d, nn.GroupNorm, nn.ReLU)) or name == self._output
        ]
        with until_the_end([layer.register_forward_hook(partial(self._see, run, name)) for name, layer in layers]):
            logits = self.model(torch.zeros(self._shape, dtype=torch.float64, requires_grad=True))
        self._after = {name: after for name, (_, _, after) in run.made.items()}
        run.logits = logits
        return run, self._losses(logits, self._one_hot).mean()

    def _convolved(self, name: str, layer: nn.Conv2d, inputs: Tensor) -> Tensor:
        """What a convolution gives; zeros where a ReLU behind it is known, so that it makes no difference."""
        if self._after.get(name, 0) <= min(self.known, default=math.inf):
            size = F.conv2d(
                inputs.to("meta"), layer.weight.to("meta"), None, layer.stride, layer.padding, layer.dilation
            )
            return inputs.new_zeros(size.shape, requires_grad=True)
        return nn.Conv2d.forward(layer, inputs)

    def _see(self, run: _Run, name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Note a layer's call, and have a ReLU give what is known of it; its derivative follows that."""
        source, _ = run.sources.get(id(inputs[0]), (None, None))
        if f"{name}.bias" in self.gradient:
            run.bias = f"{name}.bias"
        made: Any = None
        if name == self._output:
            run.last = inputs[0].detach().flatten(1)
        if isinstance(layer, nn.ReLU):
            made = len(run.relus)
            run.relus.append((run.bias, inputs[0]))
            run.direct.append(id(inputs[0]) in run.sources and inputs[0]._version == 0)
            if made in self.known:
                value = self.known[made]
                output = value + (inputs[0] - inputs[0].detach()) * (value > 0)
        elif _is_plain(layer) and f"{name}.weight" in self.gradient:
            made = name
            run.made[name] = (nn.Identity(), output, len(run.relus))
            if isinstance(source, int):
                run.fed[name] = source
        elif isinstance(layer, nn.GroupNorm) and isinstance(source, str):
            run.made[source] = (layer, output, len(run.relus))
        output = output.clone()  # what follows may change it in place
        run.sources[id(output)] = (made, output)
        if isinstance(layer, nn.ReLU):
            run.given.append(output)
        return output

    def begin(self, number: int, values: Tensor) -> None:
        """Keep what a ReLU gave but for a factor of each example; whose features follow from it tells whose it is."""
        self.known[number] = values
        order = nearest(self.run()[0].last, self._wanted)
        self._one_hot = self._one_hot[order]

    def know(self, number: int, read: "_Read") -> None:
        """Keep what a ReLU gave but for a factor of each example.

        The gradient of the bias before it tells the factors, and what passed the ReLU where that is in doubt.
        """
        passed, felt = read.values > read.least, []
        for factor in (2, 1):
            self.known[number] = factor * torch.where(passed, read.values, 0.0)
            run, loss = self.run()
            felt.append(torch.autograd.grad(loss, run.given[number])[0])
        wanted = self.gradient.get(run.relus[number][0])
        if wanted is None or len(wanted) != read.values.shape[1]:
            return
        # Through norms derivatives fall as the factor grows; past them, along a shortcut, they stay.
        falling, staying = 2 * (felt[1] - felt[0]), 2 * felt[0] - felt[1]
        inverse, weights = torch.ones(len(read.values), dtype=wanted.dtype), torch.ones_like(wanted)
        for turn in range(2 * TURNS_OF_EACH):
            falls, stays = ((each * passed).sum(dim=(2, 3)) for each in (falling, staying))
            if bool((falls.square().sum(dim=1) > TOLD * stays.square().sum(dim=1)).all()):
                equations = weights[:, None] * torch.column_stack([*falls, wanted - stays.sum(dim=0)])
                inverse = torch.linalg.lstsq(equations[:, :-1], equations[:, -1:]).solution[:, 0]
            every = staying + inverse[:, None, None, None] * falling
            left = wanted - (every * passed).sum(dim=(0, 2, 3))
            typical = left.abs().median().clamp(min=torch.finfo(wanted.dtype).tiny)
            weights = 1 / (left.abs() + typical)  # where something passed by mistake counts little
            if turn >= TURNS_OF_EACH:
                passed = passed ^ read.mistaken(torch.where(passed, -every, every), left, typical)
        values = torch.where(passed, read.values.clamp(min=torch.finfo(wanted.dtype).eps), 0.0)
        self.known[number] = values / inverse[:, None, None, None]

    def scale(self, number: int) -> None:
        """Go on to the factors that fit the last layer's gradient, which does not jump where a ReLU behind does."""
        values, factors = self.known[number], [torch.full((self._shape[0], 1), each) for each in (1 + FARTHER, 1.0)]
        wanted = self.gradient[f"{self._output}.weight"].flatten()
        made: list[Tensor] = []  # each example's, (B, numbers of the gradient)
        for _ in range(SECANTS):
            for factor in factors[len(made) :]:
                self.known[number] = factor[:, :, None, None] * values
                run, loss = self.run()
                errors = torch.autograd.grad(loss, run.logits)[0]
                made.append(torch.einsum("bk,bf->bkf", errors, run.last).flatten(1))
            slopes = (made[-1] - made[-2]) / (factors[-1] - factors[-2])
            if not bool((slopes.norm(dim=1) > TELLING * made[-1].norm(dim=1)).all()):
                break
            left = (made[-1].sum(dim=0) - wanted)[:, None]
            factors.append(factors[-1] - torch.linalg.lstsq(slopes.mT, left).solution)
        self.known[number] = factors[len(made) - 1][:, :, None, None] * values

    def parts(self, number: int) -> list[_Part]:
        """The convolutions that get what a ReLU gives."""
        run, loss = self.run()
        names = [name for name, source in run.fed.items() if source == number and run.made[name][2] < len(run.relus)]
        made = [run.made[name] for name in names]
        if not made or any(run.relus[after][1].shape != output.shape for _, output, after in made):
            return []
        errors = torch.autograd.grad(loss, [output for _, output, _ in made])
        return [
            _Part(
                self.model.get_submodule(name), norm, error, self.gradient[f"{name}.weight"],
                (run.relus[after][1] - output).detach(), self.known.get(after, run.relus[after][1].relu()).detach(),
            )
            for name, (norm, output, after), error in zip(names, made, errors, strict=True)
        ]  # fmt: skip


def nearest(made: Tensor, wanted: Tensor) -> Tensor:
    """Which of the rows (B, F) that are wanted each row is, by their directions: (B,)."""
    from scipy.optimize import linear_sum_assignment

    distances = torch.cdist(F.normalize(made.double().cpu()), F.normalize(wanted.double().cpu()))
    return torch.from_numpy(linear_sum_assignment(distances.numpy())[1])


def deepened(scene: Scene, victim: Victim, found: Activation, features: Features) -> Activation:
    """Return what the first convolution got, as far as that follows from what a later one got."""
    replay = _Replay(scene, victim, features)
    run, _ = replay.run()
    if found.layer not in run.fed:
        return found
    base, values = run.fed[found.layer], found.values * found.values.sum(dim=(1, 2, 3), keepdim=True).sign()
    values = values / values.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
    replay.begin(base, values.relu())
    first = _Read(values, -NOISE * values.amin(dim=(1, 2, 3), keepdim=True))
    replay.know(base, first)
    replay.scale(base)
    replay.know(base, first.like(replay.known[base]))
    for number in reversed(range(base)):
        if time_is_up():
            break
        parts = replay.parts(number)
        refines = len(values) == 1 and (len(parts) > 1 or run.direct[number + 1])  # of a batch it takes too long
        read = _solved(parts, run.relus[number][1].shape, refines=refines)
        if read is None:
            break
        replay.know(number, read)
        layer = next(name for name, source in run.fed.items() if source == number)
        found = Activation(layer, replay.known[number])
    return found


@dataclass(frozen=True, eq=False)
class _Read:
    """What a ReLU gave, (B, C, H, W), up to a factor of each example, and above what it did pass it."""

    values: Tensor
    least: Tensor

    def mistaken(self, changes: Tensor, left: Tensor, typical: Tensor) -> Tensor:
        """One or two numbers of a channel that explain what is left of its bias's gradient (C,): (B, C, H, W).

        ``changes``, (B, C, H, W), are what it changes by where a number passed by mistake, or did not.
        """
        doubtful = _by_channel(self.values.abs() < DOUBTFUL * self.least)
        shown = left.abs() > OUTLYING * typical
        changed = torch.where(doubtful, _by_channel(changes), 1 / torch.finfo(typical.dtype).eps)
        after, best = (left[:, None] - changed).abs().min(dim=1)
        alone = shown & (after < EXPLAINS[0] * typical)
        made = torch.zeros_like(doubtful).scatter(1, best[:, None], alone[:, None])
        # Two of a channel: of those with the largest values, which noise explains least.
        values = torch.where(doubtful, _by_channel(self.values), -math.inf)
        top = values.topk(min(MOST_DOUBTFUL, values.shape[1]), dim=1).indices
        pairs = top[:, torch.combinations(torch.arange(top.shape[1]))]  # (C, pairs, 2)
        sums = changed.gather(1, pairs.flatten(1)).view(pairs.shape).sum(dim=2)
        after, best = (left[:, None] - sums).abs().min(dim=1)
        both = shown & ~alone & (after < EXPLAINS[1] * typical)
        chosen = pairs[torch.arange(len(pairs)), best]
        made |= torch.zeros_like(doubtful).scatter(1, chosen, both[:, None].expand(-1, 2))
        return _by_example(made, self.values.shape)

    def like(self, others: Tensor) -> "_Read":
        """Return the same with the factors of others (B, C, H, W), of which these are nearly multiples."""
        along, size = ((self.values * each).sum(dim=(1, 2, 3), keepdim=True) for each in (others, self.values))
        return _Read(self.values * along / size, self.least * along / size)


def _solved(parts: Sequence[_Part], shape: torch.Size, *, refines: bool) -> _Read | None:
    """What convolutions got, (B, C, H, W), up to factors; ``None``: their gradients do not tell."""
    places = shape[0] * shape[2:].numel()
    if not places <= min(sum(part.gradient[:, 0].numel() for part in parts), MOST_PLACES):
        return None
    size = torch.stack([part.gradient.norm() for part in parts]).norm()
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(START), dtype=torch.float64)
    misfits = [math.inf] * PATIENCE
    solutions: list[Tensor] = []
    changes: list[Tensor] = []
    for _ in range(ROUNDS):
        equations = zip(*(part.equations(inputs.relu()) for part in parts), strict=True)
        squares, wanted = (torch.stack(each).sum(dim=0) for each in equations)
        squares.diagonal().add_(min(RIDGE, misfits[-1] ** 2) * squares.diagonal().mean())
        root = torch.linalg.cholesky_ex(squares).L
        solved = _by_example(torch.cholesky_solve(_by_channel(wanted).mT, root).mT, shape)
        left = [part.left(inputs.relu(), solved) for part in parts]
        misfits.append(float(torch.stack([each.norm() for each in left]).norm() / size))
        solutions, changes = [*solutions[-REMEMBERED:], solved], [*changes[-REMEMBERED:], solved - inputs]
        if not misfits[-1] < SLOWER * misfits[-1 - PATIENCE]:
            break
        inputs = _extrapolated(solutions, changes)
    if misfits[-1] < (MET if refines else CLEAR):
        kinds = torch.cat([each.transpose(0, 1).flatten(1) for each in left], dim=1).square().mean(dim=1).sqrt()
        deviations = kinds[:, None] * torch.cholesky_inverse(root).diagonal().sqrt()
        deviations = _by_example(deviations, shape).clamp(min=1e-30)
        if deviations.norm() > CLOSE * solved.norm():
            return None
        return _Read(solved, NOISE * deviations * (-(solved / deviations).min()).clamp(min=LEAST))
    refined = _refined(parts, solved.relu()) if refines and misfits[-1] < ROUGH else None
    return None if refined is None else _Read(refined, torch.zeros_like(refined))


def _by_channel(values: Tensor) -> Tensor:
    """(B, C, H, W) as (C, places of all examples)."""
    return values.transpose(0, 1).flatten(1)


def _by_example(values: Tensor, shape: torch.Size) -> Tensor:
    """(C, places of all examples) as (B, C, H, W)."""
    return values.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1).contiguous()


def _extrapolated(solutions: Sequence[Tensor], changes: Sequence[Tensor]) -> Tensor:
    """Where the changes would end, as far as sums of the last ones tell (Anderson)."""
    if len(changes) == 1:
        return solutions[-1]
    turns = torch.stack([(changes[-1] - each).flatten() for each in changes[:-1]], dim=1)
    weights = torch.linalg.lstsq(turns, changes[-1].view(-1, 1)).solution
    moves = torch.stack([(solutions[-1] - each).flatten() for each in solutions[:-1]], dim=1)
    return solutions[-1] - (moves @ weights).view_as(solutions[-1])


def _refined(parts: Sequence[_Part], inputs: Tensor) -> Tensor | None:
    """Go on by Gauss-Newton, with what the norms gave; ``None``: that does not fit."""
    from scipy.sparse.linalg import LinearOperator, cg

    def misfits(inputs: Tensor) -> Tensor:
        return torch.cat([value.flatten() for part in parts for value in part.misfits(inputs)])

    def squares(vector: np.ndarray) -> np.ndarray:
        along = torch.func.jvp(misfits, (inputs,), (torch.from_numpy(vector).view_as(inputs),))[1]
        return pull(along)[0].flatten().numpy()

    def nearly_solved(vector: np.ndarray) -> np.ndarray:
        wanted = _by_channel(torch.from_numpy(vector).view_as(inputs))
        return _by_example(torch.cholesky_solve(wanted.mT, root).mT, inputs.shape).flatten().numpy()

    probe = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(START), dtype=torch.float64)
    size = (inputs.numel(),) * 2
    for _ in range(REFINED):
        left, pull, *_ = torch.func.vjp(misfits, inputs)
        products = [part.equations(inputs)[0] / part.gradient.square().sum() for part in parts]
        nearly = torch.stack(products).sum(dim=0)
        for part in parts:
            nearly.diagonal().add_(
                torch.func.jvp(part.misfits, (inputs,), (probe,))[1][1].square().sum() / probe.numel()
            )
        root = torch.linalg.cholesky_ex(nearly).L
        step, _ = cg(
            LinearOperator(size, matvec=squares, dtype=np.float64),
            pull(left)[0].flatten().numpy(),
            M=LinearOperator(size, matvec=nearly_solved, dtype=np.float64),
            maxiter=CONJUGATE,
        )
        inputs = inputs - torch.from_numpy(step).view_as(inputs)
    return inputs.relu() if misfits(inputs).norm() < CLOSE else None


TYPICAL, FARTHEST = 0.7, 6.0  # mean square of an image on the scale of the network's input, and the factor it may have


@dataclass(frozen=True, eq=False)
class Contrast:
    """What tells how strong an image is where a first convolution without bias before a GroupNorm hides it.

    It does but for the norm's epsilon: along a group's weights the gradient is that of the norm's own factors, times
    epsilon over the group's variance and epsilon.
    """

    first: nn.Conv2d
    weight: Tensor
    groups: int
    epsilon: float
    inner: Tensor  # (groups,), products of the convolution's weights and their gradients
    whole: Tensor  # (groups,), the same of the norm's

    norm: str  # its name

    def restored(self, images: Tensor, wholes: Tensor | None = None) -> Tensor:
        """Return images (B, C, H, W) with the contrasts that fit the gradient best.

        ``wholes``, (B, groups), are the examples' shares of ``whole``; of a single example it is known.
        """
        with torch.no_grad():
            made = F.conv2d(images.double(), self.weight, None, self.first.stride, self.first.padding)
        variances = made.unflatten(1, (self.groups, -1)).flatten(2).var(dim=2, unbiased=False)
        if wholes is not None:
            # Next to variances epsilon is left out: what is told is linear in the contrasts' inverse squares. Their
            # prior counts as much as what the shares leave unexplained: they are those of images nearly as these.
            sizes = images.flatten(1).double().square().mean(dim=1) / TYPICAL
            shares = (self.epsilon * wholes / variances.clamp(min=1e-30)).mT * sizes
            left = self.inner - shares @ torch.linalg.lstsq(shares, self.inner[:, None]).solution[:, 0]
            noise = left.square().sum() / max(len(shares) - len(images), 1) * torch.eye(len(images)).double()
            inverse = torch.linalg.solve(shares.mT @ shares + noise, shares.mT @ self.inner + noise.sum(dim=0))
            inverse = (inverse.clamp(1 / FARTHEST, FARTHEST) * sizes).to(images)
            return images / inverse.sqrt()[:, None, None, None]
        parts = self.inner * variances[0]
        told = float(parts @ parts)
        if told == 0:  # an image of one colour
            return images
        square = self.epsilon * float((self.whole - self.inner) @ parts) / told
        return images * math.sqrt(max(square, 0.0))


def read_contrast(network: Network, parameters: Vector, gradient: Vector) -> Contrast | None:
    """Return what tells the contrast; ``None``: the features do."""
    layers = [(name, layer) for name, layer in network.model.named_modules() if not list(layer.children())]
    (first, convolution), (second, norm) = layers[:2] if len(layers) > 1 else [("", None)] * 2
    if not isinstance(convolution, nn.Conv2d) or convolution.bias is not None or not isinstance(norm, nn.GroupNorm):
        return None
    inner, whole = (
        (parameters[f"{name}.weight"].detach().double() * gradient[f"{name}.weight"])
        .view(norm.num_groups, -1)
        .sum(dim=1)
        for name in (first, second)
    )
    weight = parameters[f"{first}.weight"].detach().double()
    return Contrast(convolution, weight, norm.num_groups, norm.eps, inner, whole, second)
