"""Scene of attacks on texts: the network as the adversary runs it, the public texts, and the results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpriv.attacks.observation import TextFormat
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.core.federated import example_losses
from fedpriv.core.names import END, PAD, START
from fedpriv.core.randomness import torch_stream
from fedpriv.data.tokenizers import NO_TARGET
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import copied


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

    def targets(self, tokens: Tensor) -> Tensor:
        """Return the next token of each, (B, T), of tokens (B, T); what comes after the last one is not known."""
        following = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=PAD)
        return torch.where(following == PAD, NO_TARGET, following)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The clients' loss of each sequence (B,)."""
        return example_losses(logits, labels)

    def gradient(self, parameters: Vector, tokens: Tensor, labels: Tensor) -> Vector:
        """Return the gradient of the mean loss of sequences (B, T) with labels (B,) or (B, T), by parameter."""
        wanted = {name: parameters[name].detach().requires_grad_() for name in self.names}
        loss = self.losses(functional_call(self.model, wanted, (tokens,)), labels).mean()
        gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(self.names, gradients, strict=True))


def padded(sentences: Sequence[Sequence[int]], length: int) -> Tensor:
    """Return sentences as tokens, int64 (N, length), cut off or padded at the end."""
    tokens = torch.full((len(sentences), length), PAD, dtype=torch.int64)
    for number, sentence in enumerate(sentences):
        kept = torch.tensor(list(sentence)[:length], dtype=torch.int64)
        tokens[number, : len(kept)] = kept
    return tokens
