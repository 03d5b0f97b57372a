"""Gradients of many dummy batches at once, compared with what was heard.

A row is one restart of one victim. All rows go through the network together: ``vmap`` over rows of ``grad`` of the
loss, and autograd differentiates the result once more. Rows of one round share their parameters, which are then not
copied.
"""

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap

from attacks.reconstruction.errors import AttackRefused
from attacks.reconstruction.uploads import UploadModel, Victim, batch_mean
from fedpriv.gradients import Vector

__all__ = ["Distance", "Matcher", "Network", "chunks"]

Distance = Callable[[Vector, Vector, tuple[tuple[str, ...], ...]], Tensor]
"""(expected (N, *shape), heard (N, *shape), blocks) -> (N,)."""

# Numbers held for one chunk of rows: 2^25 float32 are 128 MiB, of which the double backward needs a handful.
CHUNK = 2**25
# Numbers of intermediate results for one pixel, a guess on the high side for small networks.
PER_PIXEL = 256


class Network:
    """A network as the adversary runs it: no dropout, BatchNorm with the statistics of the dummy batch itself."""

    def __init__(self, model: nn.Module) -> None:
        # Parameters that are not trained do not travel; they are part of the public architecture.
        self.names = tuple(name for name, value in model.named_parameters() if value.requires_grad)
        self.size = sum(value.numel() for value in model.parameters() if value.requires_grad)
        frozen = copy.deepcopy(model).eval()
        replace_all_batch_norm_modules_(frozen)
        self._model = frozen.requires_grad_(False)
        self.device = next(frozen.parameters()).device

    def logits(self, parameters: Vector, images: Tensor) -> Tensor:
        """Run normalised images (B, C, H, W) through the network with other parameters: (B, classes)."""
        logits: Tensor = functional_call(self._model, parameters, (images,))
        return logits

    def loss(self, parameters: Vector, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of images (B, C, H, W) with label probabilities (B, classes)."""
        return -(labels * F.log_softmax(self.logits(parameters, images), dim=1)).sum(dim=1).mean()

    def gradients(self, parameters: Vector, images: Tensor, labels: Tensor, *, shared: bool, each: bool) -> Vector:
        """Gradients of the loss with respect to the parameters, for many batches.

        Args:
            parameters: of shape (*shape,) where ``shared``, else (N, *shape).
            images: (N, B, C, H, W), normalised.
            labels: probabilities (N, B, classes).
            shared: whether all batches use the same parameters.
            each: whether to return each example's own gradient.

        Returns:
            Tensors (N, B, *shape) of the examples where ``each``, else (N, *shape) of the batches' means.

        Raises:
            AttackRefused: the network cannot be differentiated this way.
        """
        of_batch = vmap(self._gradient_of_one, in_dims=(None, 0, 0)) if each else self._gradient
        try:
            gradients: Vector = vmap(of_batch, in_dims=(None if shared else 0, 0, 0))(parameters, images, labels)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise AttackRefused(f"gradients of dummy images through this network fail: {reason}") from error
        return gradients

    def _gradient(self, parameters: Vector, images: Tensor, labels: Tensor) -> Vector:
        gradient: Vector = grad(self.loss)(parameters, images, labels)
        return gradient

    def _gradient_of_one(self, parameters: Vector, image: Tensor, label: Tensor) -> Vector:
        return self._gradient(parameters, image[None], label[None])


class Matcher:
    """The mismatch between dummy batches and uploads, one row for each (victim, restart).

    Args:
        network: the network.
        rows: the victim of each row; all must have the same number of examples.
        distance: compares the expected and the heard gradient.
        directional: whether the distance looks at the blocks' directions only, so that scaling a block changes nothing.
    """

    def __init__(self, network: Network, rows: Sequence[Victim], distance: Distance, *, directional: bool) -> None:
        self._network = network
        self._rows = tuple(rows)
        self._distance = distance
        self._directional = directional
        first = rows[0].parameters
        self._shared = all(victim.parameters is first for victim in rows)
        self._parameters = first if self._shared else _stack([victim.parameters for victim in rows])
        self._each = any(victim.model.needs_examples for victim in rows)
        self._groups = [
            (model, index, model.standardise(_stack([rows[i].gradient for i in index.tolist()])))
            for model, index in _groups(rows)
        ]
        self._order = torch.cat([index for _, index, _ in self._groups]).argsort()

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mismatch (N,) of images (N, B, C, H, W) with label probabilities (N, B, classes)."""
        gradients = self._network.gradients(self._parameters, images, labels, shared=self._shared, each=self._each)
        losses = [self._mismatch(gradients, *group) for group in self._groups]
        return losses[0] if len(losses) == 1 else torch.cat(losses)[self._order.to(images.device)]

    def select(self, index: Tensor) -> "Matcher":
        """Return the matcher of some of the rows."""
        rows = [self._rows[i] for i in index.tolist()]
        return Matcher(self._network, rows, self._distance, directional=self._directional)

    def _mismatch(self, gradients: Vector, model: UploadModel, index: Tensor, heard: Vector) -> Tensor:
        if len(self._groups) > 1:
            gradients = {name: value[index.to(value.device)] for name, value in gradients.items()}
        if model.needs_examples:
            expected = model.expected_of_examples(gradients)
        else:
            mean = batch_mean(gradients) if self._each else gradients
            expected = mean if self._directional and model.keeps_directions else model.expected(mean)
        return self._distance(model.standardise(expected), heard, model.blocks(self._network.names))


def chunks(network: Network, rows: Sequence[Victim], pixels: int) -> Iterator[range]:
    """Cut the rows into consecutive ranges that fit in memory.

    Args:
        network: the network.
        rows: the victim of each row.
        pixels: numbers in one image.
    """
    examples = rows[0].model.examples
    each = examples if any(victim.model.needs_examples for victim in rows) else 1
    cost = network.size * each + pixels * examples * PER_PIXEL
    size = max(1, CHUNK // cost)
    for start in range(0, len(rows), size):
        yield range(start, min(start + size, len(rows)))


def _stack(vectors: Sequence[Vector]) -> Vector:
    return {name: torch.stack([vector[name] for vector in vectors]) for name in vectors[0]}


def _groups(rows: Sequence[Victim]) -> list[tuple[UploadModel, Tensor]]:
    members: dict[UploadModel, list[int]] = {}
    for number, victim in enumerate(rows):
        members.setdefault(victim.model, []).append(number)
    return [(model, torch.tensor(numbers)) for model, numbers in members.items()]
