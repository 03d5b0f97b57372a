"""The most probable sentences by single changes, each tried with the upload itself (coordinate descent).

Which of thousands of tokens to try in which place is told by the derivative of the likelihood with respect to the
probabilities of tokens, at the sentences as they stand (Ebrahimi et al. 2018, HotFlip), and by the language model.
What is tried is compared exactly. Where no other token helps, places are exchanged, tokens moved, left out or doubled,
and sentences of a batch exchange theirs.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.matching import Matcher, Objective
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.texts.scene import TextScene
from fedpriv.attacks.texts.search.changes import crossed, joined, rearranged, replaced, shortened
from fedpriv.attacks.texts.search.language import Language
from fedpriv.attacks.texts.search.scoring import Scorer, Texts, soft_batch
from fedpriv.core.names import PAD

__all__ = ["Climb", "Reached", "Tell"]

TRIED, EACH = 64, 8  # other tokens that are tried in a sentence at once, and in one place
KICKED = 0.3  # of the tokens are drawn anew to leave a summit
DEEPER = 4  # orders of each length, from which other tokens are tried where no change by itself helps

Tell = Callable[[int, float], None]
"""(rounds done, loss so far)."""


@dataclass(frozen=True, eq=False)
class Reached:
    """Where a search is: sentences, minus the logarithm of their posterior, and the rounds made so far."""

    texts: Texts
    loss: float
    rounds: int = 0


class Climb:
    """Makes sentences more probable until no change that is tried does.

    Args:
        scene: what is public.
        victim: the upload.
        soft: the network on probabilities.
        objective: minus the log-likelihood.
        language: the prior.
    """

    def __init__(
        self, scene: TextScene, victim: Victim, soft: Network, objective: Objective, language: Language
    ) -> None:
        self._scene = scene
        self._language = language
        self._scorer = Scorer(scene, victim, soft, objective)
        self._slopes = Matcher(soft, [victim], objective, often=False)
        self._known = len(scene.opening)
        self._labelled = scene.is_next or victim.labels is not None

    def at(self, texts: Texts) -> Reached:
        """Return where a search begins."""
        return Reached(texts, self._scorer.loss(texts) + float(self._language.surprise(texts.tokens).sum()))

    def climb(self, start: Reached, rounds: int, tell: Tell) -> Reached:
        """Change sentences until no change helps, or so many rounds are made in all."""
        now = start
        while now.rounds < rounds:
            before = now.loss
            for step in (self._replace, self._rearrange, self._cross, self._deepen):
                now = step(now)
                if now.loss < before:
                    break
            now = Reached(now.texts, now.loss, now.rounds + 1)
            tell(now.rounds, now.loss)
            if not now.loss < before:
                break
        return now

    def kicked(self, now: Reached, stream: torch.Generator) -> Reached:
        """Return sentences in which a third of the tokens is drawn anew, from what is usual there."""
        tokens = now.texts.tokens.clone()
        chances = self._language.chances(tokens[:, :-1]).exp() * self._scene.inner
        drawn = torch.multinomial(chances.flatten(0, 1).cpu(), 1, generator=stream).view(len(tokens), -1).to(tokens)
        chosen = (torch.rand(drawn.shape, generator=stream) < KICKED).to(tokens.device) & (tokens[:, 1:] != PAD)
        tokens[:, 1:] = torch.where(chosen, drawn, tokens[:, 1:])
        return replace(self.at(Texts(tokens, now.texts.labels)), rounds=now.rounds)

    def _replace(self, now: Reached) -> Reached:
        """Other tokens in all sentences, by slopes at where they stood before."""
        slopes = self._promises(now.texts)
        for slot in range(len(now.texts.tokens)):
            now = self._best(now, slot, replaced(now.texts.tokens[slot], slopes[slot], TRIED, EACH))
        return now

    def _rearrange(self, now: Reached) -> Reached:
        """Tokens in other places, and other labels."""
        for slot in range(len(now.texts.tokens)):
            sentence = now.texts.tokens[slot]
            now = self._best(now, slot, torch.cat([rearranged(sentence, self._known), shortened(sentence)]))
            now = self._relabel(now, slot)
        return now

    def _relabel(self, now: Reached, slot: int) -> Reached:
        if self._labelled:
            return now
        labels = torch.arange(self._scene.classes, device=self._scene.device)[:, None]
        sentences = now.texts.tokens[slot].expand(len(labels), 1, -1)
        return self._taken(now, (slot,), sentences, labels)

    def _cross(self, now: Reached) -> Reached:
        """Tokens in other sentences."""
        for pair in itertools.combinations(range(len(now.texts.tokens)), 2):
            made = crossed(now.texts.tokens[pair[0]], now.texts.tokens[pair[1]], self._known)
            if len(made):
                now = self._taken(now, pair, made, now.texts.labels[list(pair)].expand(len(made), 2))
        return now

    def _deepen(self, now: Reached) -> Reached:
        """Another order and then other tokens, where each of the two by itself makes matters worse."""
        for slot in range(len(now.texts.tokens)):
            made = rearranged(now.texts.tokens[slot], self._known)[:, None]
            if not len(made):
                continue
            labels = now.texts.labels[slot].expand(len(made), 1)
            losses = self._losses(now, (slot,), made, labels)
            lengths = (made[:, 0] != PAD).sum(dim=1)
            best = [
                torch.where(lengths == length, losses, math.inf).argsort(stable=True) for length in lengths.unique()
            ]
            for number in torch.stack(best)[:, :DEEPER].flatten().tolist():
                other = now.texts.exchanged((slot,), made[number], labels[number])
                found = self._replace(Reached(other, float(losses[number]), now.rounds))
                if found.loss < now.loss:
                    return found
        return now

    def _promises(self, texts: Texts) -> Tensor:
        """What each token in each place is to change, (B, L, V), to first order; infinite where it may not stand."""
        probabilities = F.one_hot(texts.tokens, self._scene.format.vocabulary).to(torch.float32)[None].requires_grad_()
        losses = self._slopes(*soft_batch(self._scene, probabilities, texts.labels[None]))
        (slopes,) = torch.autograd.grad(losses.sum(), probabilities)
        promises = slopes[0].nan_to_num(0.0, 0.0, 0.0)
        promises[:, 1:] -= self._language.chances(texts.tokens[:, :-1])
        promises = promises - promises.gather(2, texts.tokens[:, :, None])
        fixed = texts.tokens == PAD
        fixed[:, : self._known] = True
        promises.masked_fill_(fixed[:, :, None] | ~self._scene.inner, math.inf)
        return promises.scatter_(2, texts.tokens[:, :, None], math.inf)

    def _best(self, now: Reached, slot: int, sentences: Tensor) -> Reached:
        """The best of sentences (n, L) in a place, or of several changes together."""
        if not len(sentences):
            return now
        losses = self._losses(now, (slot,), sentences[:, None], now.texts.labels[slot].expand(len(sentences), 1))
        order = losses.argsort(stable=True)
        better = order[losses[order] < now.loss]
        if not len(better):
            return now
        made = joined(now.texts.tokens[slot], sentences[better])[:, None]
        return self._taken(now, (slot,), made, now.texts.labels[slot].expand(len(made), 1))

    def _taken(self, now: Reached, slots: tuple[int, ...], sentences: Tensor, labels: Tensor) -> Reached:
        """The best of sentences (n, k, L) with labels (n, k) in k places, or what stands there."""
        losses = self._losses(now, slots, sentences, labels)
        best = int(losses.argmin())
        if not float(losses[best]) < now.loss:
            return now
        return Reached(now.texts.exchanged(slots, sentences[best], labels[best]), float(losses[best]), now.rounds)

    def _losses(self, now: Reached, slots: tuple[int, ...], sentences: Tensor, labels: Tensor) -> Tensor:
        """Minus the log-posterior (n,) with others in some places; infinite where it is no number."""
        others = [number for number in range(len(now.texts.tokens)) if number not in slots]
        rest = self._language.surprise(now.texts.tokens[others]).sum()
        surprise = self._language.surprise(sentences.flatten(0, 1)).view(len(sentences), -1).sum(dim=1)
        losses = self._scorer.exchanged(now.texts, slots, sentences, labels) + surprise + rest
        return losses.nan_to_num(math.inf, math.inf, math.inf)
