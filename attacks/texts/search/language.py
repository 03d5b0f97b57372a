"""How usual a sentence is: a language model of public texts, or one that is read from a file."""

from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.texts.scene import TextScene
from fedpriv.core.names import PAD
from fedpriv.core.randomness import seeded_generators, torch_stream
from fedpriv.models.machinery.gpt import Gpt
from fedpriv.models.machinery.llama import Llama

__all__ = ["Language"]

SEED = 20261125  # of the model's weights and of the order of texts: it is the same in every attack
WIDTH, DEPTH, HEADS = 64, 2, 4
RATE, BATCH, EPOCHS = 3e-3, 32, 6
HELD = 10  # each so manyth text is held out; training ends where they no longer become more usual
EVEN = 0.05  # of the chances are the same for all tokens: a small model is too sure of what it never saw


class Language:
    """A language model over the tokens of an experiment.

    Args:
        network: maps tokens (N, T) to logits of the next token, (N, T, V).
        title: what it is, for people.
    """

    def __init__(self, network: nn.Module, title: str) -> None:
        self._network = network.eval()
        self.title = title

    @staticmethod
    def of(scene: TextScene, file: str) -> "Language":
        """Return the model of a file, or one that is trained on the public texts.

        Args:
            scene: vocabulary and public texts.
            file: a stories260k.npz, for texts of its tokens; empty: none.

        Raises:
            AttackRefused: its tokens are others, or there are no public texts.
            InputError: the file cannot be read.
        """
        if file:
            network = Llama.read(Path(file))
            if network.vocabulary != scene.format.vocabulary:
                raise AttackRefused(
                    f"{file} knows {network.vocabulary} tokens, these texts have {scene.format.vocabulary}"
                )
            return Language(network, f"prior: the Llama of {Path(file).name}")
        return _trained(scene)

    def surprise(self, sentences: Tensor) -> Tensor:
        """Return minus the log-probability (N,) of sentences (N, L) behind their first token, in nats."""
        following = sentences[:, 1:]
        chances = self.chances(sentences[:, :-1]).gather(2, following[:, :, None])[:, :, 0]
        return -(chances * (following != PAD)).sum(dim=1).double()

    def chances(self, sentences: Tensor) -> Tensor:
        """Return the log-probabilities (N, T, V) of the next token behind each of sentences (N, T)."""
        with torch.no_grad():
            logits: Tensor = self._network(sentences)
        even = torch.full_like(logits, EVEN / logits.shape[2]).log()
        return torch.logaddexp(even, logits.log_softmax(dim=2) + torch.log1p(torch.tensor(-EVEN)))


@lru_cache(maxsize=1)
def _trained(scene: TextScene) -> Language:
    """A small GPT, trained on the public texts until those held out no longer become more usual."""
    if scene.public is None or len(scene.public) < HELD:
        raise AttackRefused("there are fewer than 10 public texts that a language model could learn from")
    order = torch.randperm(len(scene.public), generator=torch_stream(SEED, "order of public texts"))
    texts = scene.public[order.to(scene.public.device)].to(scene.device)
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
    return Language(network.requires_grad_(False), title)


def _surprise(network: nn.Module, texts: Tensor) -> Tensor:
    """The mean over the tokens of texts (N, T)."""
    return F.cross_entropy(network(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten(), ignore_index=PAD)
