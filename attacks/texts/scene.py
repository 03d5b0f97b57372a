"""Scene of attacks on texts: the network as the adversary runs it, the public texts, and the results."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpriv.attacks.observation import TextFormat
from fedpriv.attacks.reconstruction.results import AttackRefused, Reconstruction, Restart
from fedpriv.attacks.reconstruction.scene import ENDED, one_of, time_is_up
from fedpriv.attacks.reconstruction.upload_model import OtherBatches, Victim, join, prepare_victims, uploads_of
from fedpriv.core.errors import printable
from fedpriv.core.federated import example_losses
from fedpriv.core.names import END, PAD, START
from fedpriv.core.randomness import torch_stream
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import copied

if TYPE_CHECKING:
    from fedpriv.attacks.reconstruction.engine import AttackJob
    from fedpriv.attacks.texts.uploads import TextAttackSettings


@dataclass(frozen=True, eq=False)
class Sentences:
    """One attempt at the sentences behind an upload."""

    tokens: Tensor  # int64 (N, T), padded at the end; N need not be the number of examples. The order says nothing.
    labels: Tensor  # int64 (N,), or -1 where none is told
    loss: float  # the attack's own objective, the lower the better; may be infinite
    steps: int  # made


@dataclass(frozen=True, eq=False)
class Reading:
    """What an attack on texts hands back."""

    attempts: tuple[Sentences, ...]  # one for each restart; the one with the lowest loss is shown
    note: str = ""  # what a reader must know of the result; may be empty


@dataclass(frozen=True, eq=False)
class TextScene:
    """The public facts of the texts behind a set of uploads."""

    # the network in evaluation mode; its own parameters do not matter, and those that are not trained are public. It is
    # not to be changed.
    model: nn.Module
    names: tuple[str, ...]  # of the trained parameters
    format: TextFormat  # vocabulary and task
    length: int  # T, of a sequence
    classes: int  # of labels; of the next token the vocabulary
    # (M, T), int64: texts of the same kind, none of the victims'; `None`: they are withheld
    public: Tensor | None = None

    @staticmethod
    def of(
        model: nn.Module, shape: tuple[int, int, int], classes: int, form: TextFormat, public: Tensor | None
    ) -> "TextScene":
        """Read the public settings; the network is copied."""
        names = tuple(name for name, value in model.named_parameters() if value.requires_grad)
        still = copied(model).eval().requires_grad_(False)
        texts = None if public is None else public.flatten(1).long()
        return TextScene(still, names, form, shape[-1], classes, texts)

    @property
    def is_next(self) -> bool:
        """Whether the next token is predicted, and no class of a whole sequence."""
        return self.format.task == "next"

    @property
    def opening(self) -> tuple[int, ...]:
        """The tokens with which every sequence begins; none where texts are packed."""
        return () if self.format.packed else (START,)

    @property
    def inner(self) -> Tensor:
        """Which tokens may stand within a sentence, bool (V,), with its end where the next token is predicted."""
        allowed = torch.ones(self.format.vocabulary, dtype=torch.bool, device=self.device)
        allowed[[PAD, *self.opening] if self.is_next else [PAD, START, END]] = False
        return allowed

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters()).device

    def stream(self, seed: int, attack: str, victim: Victim, restart: int) -> torch.Generator:
        """Random numbers that depend on seed, attack, round, client and restart: not on who else is attacked."""
        return torch_stream(seed, f"attack {attack}", victim.round, victim.client, restart)

    def with_parameters(self, parameters: Vector, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return a copy of the network with the parameters that a client was sent, in the numbers asked for."""
        network = copied(self.model).to(dtype)
        with torch.no_grad():
            places = dict(network.named_parameters())
            for name, value in parameters.items():
                places[name].copy_(value)
        return network

    def gradient(self, parameters: Vector, tokens: Tensor, labels: Tensor) -> Vector:
        """Return the gradient of the mean loss of sequences (B, T) with labels (B,) or (B, T), by parameter."""
        wanted = {name: parameters[name].detach().requires_grad_() for name in self.names}
        loss = example_losses(functional_call(self.model, wanted, (tokens,)), labels).mean()
        gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(self.names, gradients, strict=True))


def padded(sentences: Sequence[Sequence[int]], length: int) -> Tensor:
    """Return sentences as tokens, int64 (N, length), cut off or padded at the end."""
    tokens = torch.full((len(sentences), length), PAD, dtype=torch.int64)
    for number, sentence in enumerate(sentences):
        kept = torch.tensor(list(sentence)[:length], dtype=torch.int64)
        tokens[number, : len(kept)] = kept
    return tokens


def read_texts(job: "AttackJob") -> list[Reconstruction]:
    """Attack the texts behind uploads, one after the other; a result's "images" are tokens, int64 (N, 1, 1, T)."""
    config: TextAttackSettings = job.config
    observations = [observation for heard in job.observations for observation in uploads_of(heard)]
    settings = observations[0].settings
    if settings.text is None:
        raise AttackRefused(f"{config.name} reads texts, and these uploads are of images or rows of tables")
    if any(isinstance(heard, OtherBatches) for heard in job.observations):
        raise AttackRefused(f"{config.name} reads one batch; uploads of other batches are read one by one")
    scene = TextScene.of(job.model, settings.shape, settings.classes, settings.text, job.public_images)
    prepared = iter(prepare_victims(observations, scene.names, scene.device))
    victims = [join([next(prepared) for _ in uploads_of(heard)]) for heard in job.observations]
    listener = job.progress or (lambda done, steps, loss: None)
    read = resolve_name(config.made_of[0])
    results = []
    for number, victim in enumerate(victims):
        began = time.perf_counter()
        reading = read(scene, victim, config, job.seed, one_of(listener, number, len(victims)))
        _check(config.name, scene, reading)
        if scene.format.mark:
            reading = replace(reading, note=f"{reading.note}; all before responses is read and counted, too")
        results.append(_result(config.name, victim, reading, time.perf_counter() - began))
    return results


def _check(name: str, scene: TextScene, reading: Reading) -> None:
    """Refuse a reading that cannot be one: what scores it expects what :class:`Reading` says."""
    if not reading.attempts:
        raise AttackRefused(f"{name} returned no attempt")
    for attempt in reading.attempts:
        tokens, labels = attempt.tokens, attempt.labels
        if tokens.ndim != 2 or tokens.shape[1] != scene.length or tokens.dtype != torch.int64:
            raise AttackRefused(f"{name} returned {tokens.dtype} {tuple(tokens.shape)}; expected (N, {scene.length})")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < scene.format.vocabulary:
            raise AttackRefused(f"{name} returned tokens that are not from 0 to {scene.format.vocabulary - 1}")
        if labels.shape != (len(tokens),) or labels.dtype != torch.int64:
            raise AttackRefused(
                f"{name} returned labels {labels.dtype} {tuple(labels.shape)}, expected ({len(tokens)},)"
            )


def _result(name: str, victim: Victim, reading: Reading, seconds: float) -> Reconstruction:
    attempts = tuple(map(_attempt, reading.attempts))
    chosen = Reconstruction.lowest(attempts)
    ended = ENDED if time_is_up() else ""
    notes = "; ".join(text for text in (victim.note, printable(reading.note), ended) if text)
    return Reconstruction(victim.round, victim.client, name, attempts, chosen, notes, seconds)


def _attempt(sentences: Sentences) -> Restart:
    tokens = sentences.tokens.cpu()[:, None, None]
    loss = sentences.loss if math.isfinite(sentences.loss) else None
    return Restart(tokens, sentences.labels.cpu(), loss, sentences.steps)
