"""How well sentences explain an upload, and how usual they are.

Gradients of tokens follow layer by layer (``fedpriv.gradients``), so that hundreds of sentences go through the network
together and none of their gradients is written out. Where the likelihood needs them written, or the upload is of
several local steps, they are, a few at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.factors import Targets
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.matching import Compared, Matcher, Objective, squared_distance
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.reconstruction.upload_model import UploadModel, Victim
from fedpriv.attacks.texts.scene import TextScene
from fedpriv.attacks.texts.soft import soft_targets
from fedpriv.core.federated import example_losses
from fedpriv.core.names import PAD
from fedpriv.core.randomness import seeded_generators, torch_stream
from fedpriv.data.tokenizers import next_targets
from fedpriv.gradients import Block, GradientOperator, Route, Vector, find_route, flattened, per_example_gradients
from fedpriv.gradients.operator import total, wide
from fedpriv.models.machinery.llama import Llama
from fedpriv.models.machinery.transformer import Gpt

TOGETHER = 64  # sentences that go through the network at once
WRITTEN = 8  # batches whose gradients are written out at once


@dataclass(frozen=True, eq=False)
class Texts:
    """A batch of sentences that may be behind an upload."""

    # int64 (B, L), padded at the end; L is T, or T + 1 where the next token is predicted: then the last one is a target
    # only
    tokens: Tensor
    labels: Tensor  # int64 (B,); of the next token they are not looked at

    def exchanged(self, slots: Sequence[int], sentences: Tensor, labels: Tensor) -> "Texts":
        """Return the batch with other sentences (k, L) and labels (k,) in k places."""
        tokens, classes = self.tokens.clone(), self.labels.clone()
        tokens[list(slots)], classes[list(slots)] = sentences, labels
        return Texts(tokens, classes)


def split(scene: TextScene, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the network takes (N, T), and the targets of its loss, of sentences (N, L) with labels (N,)."""
    if not scene.is_next:
        return tokens, labels
    return tokens[:, :-1], next_targets(tokens, scene.format.mark, scene.format.until)


def soft_batch(scene: TextScene, probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs (N, B, 1, T, V) and label probabilities of a soft network, of (N, B, L, V) and labels (N, B)."""
    if not scene.is_next:
        return probabilities[:, :, None], F.one_hot(labels, scene.classes).to(probabilities)
    return probabilities[:, :, None, :-1], soft_targets(probabilities, scene.format.mark, scene.format.until)


def trained_network(scene: TextScene, victim: Victim) -> nn.Module:
    """Return the network with the numbers that the client was sent; what is trained asks for derivatives."""
    network = scene.with_parameters(victim.parameters, next(iter(victim.parameters.values())).dtype)
    for name, value in network.named_parameters():
        value.requires_grad_(name in scene.names)
    return network


class Scorer:
    """Compares batches of sentences with an upload, or with several of the same sentences."""

    def __init__(self, scene: TextScene, victim: Victim, soft: Network, objective: Objective) -> None:
        self._scene = scene
        needs_writing = any(_needs_writing(upload) for upload in victim.uploads)
        self._matcher = Matcher(soft, [victim] * WRITTEN, objective, often=False) if needs_writing else None
        self._uploads = [] if needs_writing else [_Upload(scene, upload, objective) for upload in victim.uploads]

    def loss(self, texts: Texts) -> float:
        """Return the objective of a batch."""
        return float(self.exchanged(texts, (0,), texts.tokens[None, :1], texts.labels[None, :1]))

    def exchanged(self, texts: Texts, slots: Sequence[int], sentences: Tensor, labels: Tensor) -> Tensor:
        """Return the objective (N,) of a batch with other sentences (N, k, L) in some of its places."""
        step = max(1, WRITTEN if self._matcher is not None else TOGETHER // len(slots))
        parts = zip(sentences.split(step), labels.split(step), strict=True)
        return torch.cat([self._score(texts, slots, *part) for part in parts])

    def _score(self, texts: Texts, slots: Sequence[int], sentences: Tensor, labels: Tensor) -> Tensor:
        if self._matcher is None:
            return total([upload.losses(texts, slots, sentences, labels) for upload in self._uploads])
        tokens, classes = (values.repeat(len(sentences), *[1] * values.ndim) for values in (texts.tokens, texts.labels))
        tokens[:, list(slots)], classes[:, list(slots)] = sentences, labels
        probabilities = F.one_hot(tokens, self._scene.format.vocabulary).to(torch.float32)
        rows = torch.arange(len(sentences), device=tokens.device)
        with torch.no_grad():
            return self._matcher.select(rows)(*soft_batch(self._scene, probabilities, classes))


def _needs_writing(victim: Victim) -> bool:
    scales = victim.model.mechanism.scales(tuple(victim.gradient))
    return victim.model.training is not None or victim.needs_writing or scales is None


class _Norms:
    """What an upload model asks of units' gradients: squared norms (N, U) of blocks of parameters."""

    def __init__(self, gradients: GradientOperator, squared: Callable[[Block], Tensor]) -> None:
        self.names: Block = tuple(gradients.shapes)
        self._gradients = gradients
        self._squared = squared

    def dimension(self, block: Block) -> int:
        """Return the number of coordinates of some parameters."""
        return self._gradients.dimension(block)

    def squared(self, block: Block) -> Tensor:
        """Return the squared norms (N, U) of some parameters."""
        return self._squared(block)


class _Rest:
    """The sentences of a batch that are not exchanged: what they add to what is expected, and its inner products.

    Attributes:
        norms: block -> squared norms (1, n) of their gradients.
        sums: the sum of their gradients, weighed where each is weighed by itself.
    """

    def __init__(self, gradients: GradientOperator, model: UploadModel, scales: Mapping[str, float]) -> None:
        count = gradients.examples
        self.norms = cache(lambda block: wide(gradients.norms(block).square())[None])
        ones = torch.ones(count, dtype=gradients.dtype, device=gradients.device)
        self.sums: Vector = {}
        if not model.needs_examples:
            self.sums = gradients.combine(ones)
            return
        share = count / model.examples  # weights are those of a mean of so many
        for block, weights in model.weights(_Norms(gradients, self.norms), scales):
            self.sums |= gradients.combine(share * weights[0].to(ones), block)

    def dot(self, vector: Vector, block: Block) -> Tensor:
        """Return the inner product of their sum with a vector, ()."""
        return total([wide(self.sums[name] * vector[name]).sum() for name in block])


class _Upload:
    """One upload."""

    def __init__(self, scene: TextScene, victim: Victim, objective: Objective) -> None:
        self._scene = scene
        self._model = victim.model
        self._objective = objective
        mechanism = victim.model.mechanism
        names = tuple(victim.gradient)
        self._blocks = mechanism.directions(names)
        self._scales = mechanism.scales(names) or {}
        self._network = trained_network(scene, victim)
        self._heard = mechanism.standardise(victim.gradient)
        self._kept: tuple[Texts, tuple[int, ...], _Rest | None] | None = None
        self._routes: dict[int, Route] = {}

    def losses(self, texts: Texts, slots: Sequence[int], sentences: Tensor, labels: Tensor) -> Tensor:
        """As :meth:`Scorer.exchanged`."""
        gradients = self._gradients(sentences.flatten(0, 1), labels.flatten())
        parts = self._parts(gradients, len(slots), self._rest(texts, tuple(slots)))
        by_block = [[part for part in parts if set(part[0]) <= set(block)] for block in self._blocks]
        dot = torch.stack([total([each for _, each, _ in mine]) for mine in by_block], dim=1)
        squared = torch.stack([total([each for _, _, each in mine]) for mine in by_block], dim=1)
        targets = Targets([self._heard], [0] * len(sentences), often=False)
        heard = torch.stack([total([targets.squared(name) for name in block]) for block in self._blocks], dim=1)
        comparison = Compared(dot, squared, wide(heard), self._blocks, self._model, _unwritten, targets)
        return self._objective(comparison)

    def _gradients(self, sentences: Tensor, labels: Tensor) -> GradientOperator:
        x, y = split(self._scene, sentences, labels)
        if len(x) not in self._routes:
            self._routes[len(x)] = find_route(self._network, example_losses, x, y)
        return per_example_gradients(self._network, example_losses, x, y, route=self._routes[len(x)])

    def _rest(self, texts: Texts, slots: tuple[int, ...]) -> _Rest | None:
        if len(texts.tokens) == len(slots):
            return None
        if self._kept is None or self._kept[0] is not texts or self._kept[1] != slots:
            others = [number for number in range(len(texts.tokens)) if number not in slots]
            gradients = self._gradients(texts.tokens[others], texts.labels[others])
            self._kept = texts, slots, _Rest(gradients, self._model, self._scales)
        return self._kept[2]

    def _parts(self, gradients: GradientOperator, count: int, rest: _Rest | None) -> list[tuple[Block, Tensor, Tensor]]:
        """Of each block what is expected times what was heard, (N,), and its squared norm, (N,)."""
        groups = gradients.examples // count

        @cache
        def gram(block: Block) -> Tensor:
            if count == 1:
                return wide(gradients.norms(block).square())[:, None, None]
            return wide(gradients.grams(groups, block, precise=False).to(gradients.device))

        def dots(vector: Vector, block: Block) -> Tensor:
            return wide(gradients.dot(vector, block)).view(groups, count)

        def squared(block: Block, weights: Tensor) -> Tensor:
            own = torch.einsum("ni,nij,nj->n", weights, gram(block), weights)
            if rest is None:
                return own
            return own + 2 * (weights * dots(rest.sums, block)).sum(dim=1) + rest.dot(rest.sums, block)

        def dot(block: Block, weights: Tensor) -> Tensor:
            own = (weights * dots(self._heard, block)).sum(dim=1)
            return own if rest is None else own + rest.dot(self._heard, block)

        def of_examples(block: Block) -> Tensor:
            own = gram(block).diagonal(dim1=1, dim2=2)
            return own if rest is None else torch.cat([own, rest.norms(block).expand(groups, -1)], dim=1)

        ones = torch.ones(groups, count, dtype=torch.float64, device=gradients.device)
        if self._model.needs_examples:
            weighed = self._model.weights(_Norms(gradients, of_examples), self._scales)
            own = [(block, wide(weights[:, :count])) for block, weights in weighed]
            return [(block, dot(block, weights), squared(block, weights)) for block, weights in own]
        size = self._model.examples
        norms = _Norms(gradients, lambda block: squared(block, ones)[:, None] / size**2)
        return [
            (
                block,
                wide(weight[:, 0]) / size * dot(block, ones),
                wide(weight[:, 0]).square() * norms.squared(block)[:, 0],
            )
            for block, weight in self._model.weights(norms, self._scales)
        ]


def _unwritten() -> Vector:
    raise ValueError("these gradients are not written out")


# How usual a sentence is: a language model of public texts, or one that is read from a file.


SEED = 20261125  # of the model's weights and of the order of texts: it is the same in every attack
WIDTH, DEPTH, HEADS = 64, 2, 4
RATE, BATCH, EPOCHS = 3e-3, 32, 6
HELD = 10  # each so manyth text is held out; training ends where they no longer become more usual
EVEN = 0.05  # of the chances are the same for all tokens: a small model is too sure of what it never saw


class Language:
    """A language model over the tokens of an experiment, from (N, T) to logits of the next token, (N, T, V)."""

    def __init__(self, network: Callable[[Tensor], Tensor], title: str) -> None:
        self._network = network
        self.title = title

    @staticmethod
    def of(scene: TextScene, file: str) -> "Language":
        """Return the model of a file, or one trained on the public texts; few make tokens alike."""
        if file:
            network = Llama.read(Path(file))
            if network.vocabulary != scene.format.vocabulary:
                raise AttackRefused(
                    f"{file} knows {network.vocabulary} tokens, these texts have {scene.format.vocabulary}"
                )
            return Language(network.eval(), f"prior: the Llama of {Path(file).name}")
        if scene.public is None or len(scene.public) < HELD:
            size, title = (
                scene.format.vocabulary,
                f"prior: all tokens are as usual, without {HELD} public texts to learn from",
            )
            return Language(lambda tokens: torch.zeros(*tokens.shape, size, device=tokens.device), title)
        return _trained(scene, scene.public)

    def surprise(self, sentences: Tensor) -> Tensor:
        """Return minus the log-probability (N,) of sentences (N, L) behind their first token, in nats."""
        following = sentences[:, 1:]
        chances = self.chances(sentences[:, :-1]).gather(2, following[:, :, None])[:, :, 0]
        return -(chances * (following != PAD)).sum(dim=1).double()

    def chances(self, sentences: Tensor) -> Tensor:
        """Return the log-probabilities (N, T, V) of the next token behind each of sentences (N, T)."""
        with torch.no_grad():
            logits = self._network(sentences)
        even = torch.full_like(logits, EVEN / logits.shape[2]).log()
        return torch.logaddexp(even, logits.log_softmax(dim=2) + torch.log1p(torch.tensor(-EVEN)))


@lru_cache(maxsize=1)
def _trained(scene: TextScene, public: Tensor) -> Language:
    """A small GPT, trained on the public texts until those held out no longer become more usual."""
    order = torch.randperm(len(public), generator=torch_stream(SEED, "order of public texts"))
    texts = public[order.to(public.device)].to(scene.device)
    held = torch.arange(len(texts), device=scene.device) % HELD == 0
    fitted, tests = texts[~held], texts[held]
    with seeded_generators(torch_stream(SEED, "language model").initial_seed(), scene.device):
        network = Gpt(scene.format.vocabulary, scene.length + 1, WIDTH, DEPTH, HEADS, None).to(scene.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    best, state = float("inf"), network.state_dict()
    for _ in range(EPOCHS):
        for batch in fitted.split(BATCH):
            optimizer.zero_grad()
            _surprise(network, batch).backward()
            optimizer.step()
        with torch.no_grad():
            now = float(_surprise(network, tests))
        if now >= best:
            break
        best, state = now, {name: value.clone() for name, value in network.state_dict().items()}
    network.load_state_dict(state)
    title = f"prior: a GPT trained on {len(fitted)} public texts, {best:.2f} nats a token on {len(tests)} others"
    return Language(network.eval().requires_grad_(False), title)


def _surprise(network: nn.Module, texts: Tensor) -> Tensor:
    """The mean over the tokens of texts (N, T)."""
    return F.cross_entropy(network(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten(), ignore_index=PAD)


ROUNDING = 1e-6  # of the longest tensor


def tensor_angle(comparison: Compared) -> Tensor:
    """One minus the cosine, (N,), the mean over tensors that hold more than rounding (Balunović et al. 2022)."""
    expected, heard = comparison.expected(), comparison.upload()
    lengths = {name: float(value.norm()) for name, value in heard.items()}
    told = [name for name, length in lengths.items() if length >= ROUNDING * max(lengths.values())]
    cosines = [F.cosine_similarity(flattened(expected[name]), flattened(heard[name]), dim=1) for name in told]
    return 1 - torch.stack(cosines).mean(dim=0)


def squared_and_absolute(alpha: float) -> Objective:
    """Return the squared distance plus alpha times the absolute one, (N,), as in Deng et al. 2021.

    The absolute distance weighs 1 in the first tensor, and in a line less towards the last, which does not count.
    """

    def objective(comparison: Compared) -> Tensor:
        expected, heard = comparison.expected(), comparison.upload()
        last = max(len(expected) - 1, 1)
        absolute = [
            (1 - number / last) * flattened(expected[name] - heard[name]).abs().sum(dim=1)
            for number, name in enumerate(expected)
        ]
        return squared_distance(comparison) + alpha * torch.stack(absolute).sum(dim=0)

    return objective
