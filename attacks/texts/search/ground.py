"""What every search for sentences begins with: the upload, the network in its forms, labels, lengths and a prior."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.texts.scene import Sentences, TextScene
from fedpriv.attacks.texts.search.labels import read_text_labels
from fedpriv.attacks.texts.search.language import Language
from fedpriv.attacks.texts.search.lookup import Lookup, read_lookup
from fedpriv.attacks.texts.search.scoring import Texts, trained_network
from fedpriv.attacks.texts.search.soft import lookup_parameters, soft_network, token_vectors
from fedpriv.core.names import PAD

__all__ = ["Ground", "without"]


@dataclass(frozen=True, eq=False)
class Ground:
    """Where searches stand.

    Attributes:
        scene: what is public.
        victim: the upload.
        bare: the same upload without what tokens are looked up in, for the network on vectors.
        soft: the network on probabilities of tokens.
        vectors: the network on vectors.
        table: the vectors of all tokens, (V, width).
        labels: int64 (B,), or -1 where none is told.
        lookup: what the tables in the upload say; ``None``: nothing.
        lengths: of the sentences, their beginning included, as tables or usual texts tell them.
        starts: lengths at which a search begins, the longest last. Where no table tells them there are several: a
            search that begins with too many tokens fits them to the noise instead of dropping them.
    """

    scene: TextScene
    victim: Victim
    bare: Victim
    soft: Network
    vectors: Network
    table: Tensor
    labels: Tensor
    lookup: Lookup | None
    lengths: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(scene: TextScene, victim: Victim) -> "Ground":
        """Look at an upload.

        Raises:
            AttackRefused: which layer looks up tokens is not clear.
        """
        network = trained_network(scene, victim)
        vocabulary = scene.format.vocabulary
        table = token_vectors(network, vocabulary)
        soft, vectors = (soft_network(network, vocabulary, kind) for kind in ("probabilities", "vectors"))
        bare = without(victim, lookup_parameters(network, vocabulary))
        try:
            lookup = read_lookup(scene, victim)
        except AttackRefused:  # then nothing of the kind is used
            lookup = None
        labels = read_text_labels(scene, victim, soft)
        lengths = _lengths(scene, victim.model.examples, lookup)
        starts = _starts(scene, lengths) if lookup is None or lookup.length is None else (lengths,)
        return Ground(scene, victim, bare, soft, vectors, table, labels, lookup, lengths, starts)

    def drawn(self, lengths: tuple[int, ...], language: Language, stream: torch.Generator) -> Tensor:
        """Return sentences (B, L) of such lengths, of usual tokens, or of those that were looked up."""
        room = self.scene.length + self.scene.is_next
        tokens = torch.full((len(lengths), room), PAD, dtype=torch.int64)
        for number, length in enumerate(lengths):
            tokens[number, 0] = self._first(stream)
            for place in range(1, length):
                chances = language.chances(tokens[None, number, :place].to(self.scene.device))[0, -1].exp().cpu()
                tokens[number, place] = int(torch.multinomial(self._restricted(chances), 1, generator=stream))
        return tokens.to(self.scene.device)

    def _first(self, stream: torch.Generator) -> int:
        """The token that begins a sentence, or one as often as it stands in public texts."""
        if self.scene.opening:
            return self.scene.opening[0]
        counts = torch.ones(self.scene.format.vocabulary)
        if self.scene.public is not None:
            counts += self.scene.public.flatten().cpu().bincount(minlength=len(counts))
        return int(torch.multinomial(self._restricted(counts), 1, generator=stream))

    def _restricted(self, chances: Tensor) -> Tensor:
        """Chances (V,) of tokens that may stand in a sentence."""
        allowed = self.scene.inner.cpu()
        if self.lookup is not None and len(self.lookup.tokens):
            allowed = torch.zeros_like(allowed).index_fill(0, self.lookup.tokens.cpu(), value=True)
        return torch.where(allowed, chances, 0.0)

    def sentences(self, texts: Texts, loss: float, steps: int) -> Sentences:
        """Return a batch as what an attack hands back."""
        labels = torch.full_like(texts.labels, -1) if self.scene.is_next else texts.labels
        return Sentences(texts.tokens[:, : self.scene.length], labels, loss, steps)


def without(victim: Victim, names: Sequence[str]) -> Victim:
    """Return an upload, or several, without some tensors."""
    parameters = {key: value for key, value in victim.parameters.items() if key not in names}
    gradient = {key: value for key, value in victim.gradient.items() if key not in names}
    return replace(
        victim, parameters=parameters, gradient=gradient, more=tuple(without(other, names) for other in victim.more)
    )


def _starts(scene: TextScene, lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """A quarter, a half and all of some lengths, and all that there is room for."""
    shorter = (tuple(max(2, length // share) for length in lengths) for share in (4, 2, 1))
    return tuple(dict.fromkeys([*shorter, (scene.length + scene.is_next,) * len(lengths)]))


def _lengths(scene: TextScene, count: int, lookup: Lookup | None) -> tuple[int, ...]:
    """As the table of positions has it, or as usual texts."""
    room = scene.length + scene.is_next
    told = None if lookup is None else lookup.length
    longest = room if told is None else min(room, told + scene.is_next)
    if scene.public is None or (told is not None and count == 1):
        return (longest,) * count
    usual = (scene.public != PAD).sum(dim=1).sort().values
    usual = torch.where(usual == scene.length, room, usual)  # of a text that fills a sequence more is predicted
    places = [int((number + 0.5) * len(usual) / count) for number in range(count)]
    return tuple(min(longest, max(2, int(usual[place]))) for place in places)
