"""Search for the sentences behind an upload: by gradient matching over vectors of tokens, or over tokens.

``tag`` and ``lamp`` match gradients over vectors and then take the nearest tokens; ``lamp`` also reorders them.
``text_map`` climbs from sentence to sentence by single changes of tokens.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.labels import (
    find_output_layer,
    infer_labels,
    label_signatures,
    made_together,
    match_labels,
)
from fedpriv.attacks.reconstruction.matching import Matcher, Objective, angle
from fedpriv.attacks.reconstruction.posterior import misfit
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.reconstruction.scene import Progress, counted, one_of, time_is_up
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.simulation import SimulationTrial, simulated_upload, trained_upload
from fedpriv.attacks.texts.lookup import Lookup, read_lookup
from fedpriv.attacks.texts.scene import Reading, Sentences, TextScene, padded
from fedpriv.attacks.texts.scoring import (
    Language,
    Scorer,
    Texts,
    soft_batch,
    split,
    squared_and_absolute,
    tensor_angle,
    trained_network,
)
from fedpriv.attacks.texts.soft import lookup_parameters, soft_network, token_vectors
from fedpriv.attacks.texts.uploads.gradients import LampSettings, LookupSettings, TagSettings, TextMapSettings
from fedpriv.core.names import END, PAD, START
from fedpriv.data.tokenizers import next_targets
from fedpriv.gradients import Vector


def replaced(sentence: Tensor, slopes: Tensor, count: int, each: int) -> Tensor:
    """Return a sentence (L,) with one other token each, (n, L), most promising by slopes (L, V)."""
    best = slopes.topk(min(each, slopes.shape[1]), dim=1, largest=False)
    values, tokens = best.values.flatten(), best.indices.flatten()
    order = values.argsort(stable=True)[:count]
    order = order[torch.isfinite(values[order])]
    made = sentence.repeat(len(order), 1)
    places = torch.arange(len(sentence), device=sentence.device).repeat_interleave(best.values.shape[1])[order]
    made[torch.arange(len(order), device=sentence.device), places] = tokens[order]
    return made


def rearranged(sentence: Tensor, known: int) -> Tensor:
    """Return a sentence (L,) with two tokens exchanged, one moved, left out or twice, or its end moved, (n, L)."""
    tokens: list[int] = [token for token in sentence.tolist() if token != PAD]
    length, room = len(tokens), len(sentence)
    made: dict[tuple[int, ...], None] = {}
    for one in range(known, length):
        rest = tokens[:one] + tokens[one + 1 :]
        for other in range(known, length):
            made[*rest[:other], tokens[one], *rest[other:]] = None
        for other in range(one + 1, length):
            swapped = tokens.copy()
            swapped[one], swapped[other] = swapped[other], swapped[one]
            made[tuple(swapped)] = None
        if length > 2:
            made[tuple(rest)] = None
        if length < room:
            made[*tokens[:one], tokens[one], *tokens[one:]] = None
    for place in range(known + 1, length):
        made[*tokens[:known], *tokens[place:], *tokens[known:place]] = None
    made.pop(tuple(tokens), None)
    return padded(list(made), room).to(sentence.device)


def shortened(sentence: Tensor) -> Tensor:
    """Return a sentence (L,) without its last tokens, (n, L): without one, two, and so on, down to two tokens."""
    length = int((sentence != PAD).sum())
    places = torch.arange(len(sentence), device=sentence.device)
    ends = torch.arange(2, max(length, 2), device=sentence.device)
    return torch.where(places < ends[:, None], sentence, PAD)


def crossed(one: Tensor, other: Tensor, known: int) -> Tensor:
    """Return two sentences (L,) with the tokens of one place exchanged, or of all from one on, (n, 2, L)."""
    length = len(one)
    single = torch.eye(length, dtype=torch.bool, device=one.device)
    behind = torch.ones(length, length, dtype=torch.bool, device=one.device).triu()
    masks = torch.cat([single[known:], behind[1:-1]])
    made = torch.stack([torch.where(masks, other, one), torch.where(masks, one, other)], dim=1)
    # Padding ends a sentence: nothing stands behind it.
    is_padding = made == PAD
    sound = (is_padding[:, :, 1:] >= is_padding[:, :, :-1]).all(dim=2).all(dim=1) & (
        made != torch.stack([one, other])
    ).any(dim=2).any(dim=1)
    return made[sound]


# The most probable sentences by single changes, each tried with the upload itself (coordinate descent).
#
# Which of thousands of tokens to try in which place is told by the derivative of the likelihood with respect to the
# probabilities of tokens, at the sentences as they stand (Ebrahimi et al. 2018, HotFlip), and by the language model.
# What is tried is compared exactly. Where no other token helps, places are exchanged, tokens moved, left out or
# doubled, and sentences of a batch exchange theirs.


TRIED, EACH = 64, 8  # other tokens that are tried in a sentence at once, and in one place
KICKED = 0.3  # of the tokens are drawn anew to leave a summit
DEEPER = 4  # orders of each length, from which other tokens are tried where no change by itself helps

Tell = Callable[[int, float], None]
"""(rounds done, loss so far)."""


@dataclass(frozen=True, eq=False)
class SearchState:
    """Where a search is: sentences, minus the logarithm of their posterior, and the rounds made so far."""

    texts: Texts
    loss: float
    rounds: int = 0


class Climb:
    """Makes sentences more probable until no change that is tried does."""

    def __init__(
        self,
        scene: TextScene,
        victim: Victim,
        soft: Network,
        objective: Objective,
        language: Language,
        known_tokens: Tensor | None = None,
    ) -> None:
        """``known_tokens``, int64 (n,): all that occur, no others; ``None``: any may occur."""
        self._scene = scene
        self._tokens = known_tokens
        self._allowed = scene.inner
        if known_tokens is not None:
            self._allowed = self._allowed & torch.zeros_like(self._allowed).index_fill(0, known_tokens, value=True)
        self._language = language
        self._scorer = Scorer(scene, victim, soft, objective)
        self._slopes = Matcher(soft, [victim], objective, often=False)
        self._known = len(scene.opening)
        self._labelled = scene.is_next or victim.labels is not None

    def at(self, texts: Texts) -> SearchState:
        """Return where a search begins."""
        return SearchState(texts, self._scorer.loss(texts) + float(self._language.surprise(texts.tokens).sum()))

    def climb(self, start: SearchState, rounds: int, tell: Tell) -> SearchState:
        """Change sentences until no change helps, or so many rounds are made in all."""
        now = start
        while now.rounds < rounds and not time_is_up():
            before = now.loss
            for step in (self._replace, self._rearrange, self._cross, self._deepen):
                now = step(now)
                if now.loss < before:
                    break
            now = SearchState(now.texts, now.loss, now.rounds + 1)
            tell(now.rounds, now.loss)
            if not now.loss < before:
                break
        return now

    def kicked(self, now: SearchState, stream: torch.Generator) -> SearchState:
        """Return sentences in which a third of the tokens is drawn anew, from what is usual there."""
        tokens = now.texts.tokens.clone()
        chances = self._language.chances(tokens[:, :-1]).exp() * self._scene.inner
        drawn = torch.multinomial(chances.flatten(0, 1).cpu(), 1, generator=stream).view(len(tokens), -1).to(tokens)
        chosen = (torch.rand(drawn.shape, generator=stream) < KICKED).to(tokens.device) & (tokens[:, 1:] != PAD)
        tokens[:, 1:] = torch.where(chosen, drawn, tokens[:, 1:])
        return replace(self.at(Texts(tokens, now.texts.labels)), rounds=now.rounds)

    def _replace(self, now: SearchState) -> SearchState:
        """Other tokens in all sentences, by slopes at where they stood before."""
        slopes = self._promises(now.texts)
        for slot in range(len(now.texts.tokens)):
            now = self._best(now, slot, replaced(now.texts.tokens[slot], slopes[slot], TRIED, EACH))
        return now

    def _rearrange(self, now: SearchState) -> SearchState:
        """Tokens in other places, and other labels."""
        for slot in range(len(now.texts.tokens)):
            sentence = now.texts.tokens[slot]
            now = self._best(now, slot, torch.cat([rearranged(sentence, self._known), shortened(sentence)]))
            now = self._relabel(now, slot)
        return now

    def _relabel(self, now: SearchState, slot: int) -> SearchState:
        if self._labelled:
            return now
        labels = torch.arange(self._scene.classes, device=self._scene.device)[:, None]
        sentences = now.texts.tokens[slot].expand(len(labels), 1, -1)
        return self._taken(now, (slot,), sentences, labels)

    def _cross(self, now: SearchState) -> SearchState:
        """Tokens in other sentences."""
        for pair in itertools.combinations(range(len(now.texts.tokens)), 2):
            made = crossed(now.texts.tokens[pair[0]], now.texts.tokens[pair[1]], self._known)
            if len(made):
                now = self._taken(now, pair, made, now.texts.labels[list(pair)].expand(len(made), 2))
        return now

    def _deepen(self, now: SearchState) -> SearchState:
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
                found = self._replace(SearchState(other, float(losses[number]), now.rounds))
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
        promises.masked_fill_(fixed[:, :, None] | ~self._allowed, math.inf)
        return promises.scatter_(2, texts.tokens[:, :, None], math.inf)

    def _best(self, now: SearchState, slot: int, sentences: Tensor) -> SearchState:
        """The best of sentences (n, L) in a place, or of several changes together."""
        if not len(sentences):
            return now
        losses = self._losses(now, (slot,), sentences[:, None], now.texts.labels[slot].expand(len(sentences), 1))
        order = losses.argsort(stable=True)
        better = order[losses[order] < now.loss]
        if not len(better):
            return now
        made = made_together(now.texts.tokens[slot], sentences[better])[:, None]
        return self._taken(now, (slot,), made, now.texts.labels[slot].expand(len(made), 1))

    def _taken(self, now: SearchState, slots: tuple[int, ...], sentences: Tensor, labels: Tensor) -> SearchState:
        """The best of sentences (n, k, L) with labels (n, k) in k places, or what stands there."""
        losses = self._losses(now, slots, sentences, labels)
        best = int(losses.argmin())
        if not float(losses[best]) < now.loss:
            return now
        return SearchState(now.texts.exchanged(slots, sentences[best], labels[best]), float(losses[best]), now.rounds)

    def _losses(self, now: SearchState, slots: tuple[int, ...], sentences: Tensor, labels: Tensor) -> Tensor:
        """Minus the log-posterior (n,) with others in some places; infinite where it is no number."""
        others = [number for number in range(len(now.texts.tokens)) if number not in slots]
        rest = self._language.surprise(now.texts.tokens[others]).sum()
        surprise = self._language.surprise(sentences.flatten(0, 1)).view(len(sentences), -1).sum(dim=1)
        losses = self._scorer.exchanged(now.texts, slots, sentences, labels) + surprise + rest
        if self._tokens is not None:
            batches = now.texts.tokens[others].flatten().expand(len(sentences), -1)
            batches = torch.cat([sentences.flatten(1), batches], dim=1)
            losses[~(batches[:, None] == self._tokens[:, None]).any(dim=2).all(dim=1)] = math.inf
        return losses.nan_to_num(math.inf, math.inf, math.inf)


SAMPLES = 8  # sentences for each class, from which a batch's labels are told
PROBE = 20261126  # the seed of random ones, where no text is public


def read_text_labels(scene: TextScene, victim: Victim, soft: Network) -> Tensor:
    """Return the labels (B,) behind an upload: known ones, or those of the last layer, ascending; -1: none is told.

    Those of several sentences are the ones whose gradients, at public sentences and through the mechanism, add up best
    to what was heard.
    """
    if victim.labels is not None:
        return victim.labels
    examples = victim.model.examples
    nothing = torch.full((examples,), -1, device=scene.device)
    shape = (1, scene.length, scene.format.vocabulary)
    layer = None if scene.is_next else find_output_layer(soft, victim.parameters, shape, scene.classes)
    if layer is None or (examples > 1 and victim.model.protects_updates):
        return nothing
    if examples == 1:
        labels = infer_labels(soft, victim, layer, shape, scene.classes)
        return nothing if labels is None else labels
    texts = F.one_hot(_texts(scene), scene.format.vocabulary).to(next(iter(victim.parameters.values())))[:, None]
    signatures = label_signatures(soft, victim, layer, texts, scene.classes)
    return match_labels(victim.gradient[layer.name].flatten(), signatures, examples)


def _texts(scene: TextScene) -> Tensor:
    """Public sentences (n, T), or random ones."""
    if scene.public is not None:
        return scene.public[:SAMPLES].to(scene.device)
    stream = torch.Generator().manual_seed(PROBE)
    tokens = torch.randint(END + 1, scene.format.vocabulary, (SAMPLES, scene.length), generator=stream)
    tokens[:, 0] = START
    return tokens.to(scene.device)


@dataclass(frozen=True, eq=False)
class Ground:
    """Where searches stand."""

    scene: TextScene  # what is public
    victim: Victim  # the upload
    bare: Victim  # the same upload without what tokens are looked up in, for the network on vectors
    soft: Network  # the network on probabilities of tokens
    vectors: Network  # the network on vectors
    table: Tensor  # the vectors of all tokens, (V, width)
    labels: Tensor  # int64 (B,), or -1 where none is told
    lookup: Lookup | None  # what the tables in the upload say; `None`: nothing
    lengths: tuple[int, ...]  # of the sentences, their beginning included, as tables or usual texts tell them
    # lengths at which a search begins, the longest last. Where no table tells them there are several: a search that
    # begins with too many tokens fits them to the noise instead of dropping them.
    starts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(scene: TextScene, victim: Victim) -> "Ground":
        """Look at an upload."""
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
        return self.marked(tokens).to(self.scene.device)

    def marked(self, tokens: Tensor) -> Tensor:
        """Sentences (N, L) with the mark of responses in the middle of each that lacks it, and so has no derivative."""
        mark, made = self.scene.format.mark, tokens.clone()
        for row in made if mark else ():
            if bool((next_targets(row, mark) < 0).all()):
                begin = max(1, (int((row != PAD).sum()) - len(mark)) // 2)
                row[begin : begin + len(mark)] = row.new_tensor(mark)
        return made

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


# Gradient matching over vectors of tokens, and from vectors to tokens.
#
# The first vector, that of every text's beginning, is known and stays.


TOGETHER = 4  # batches whose gradients are written out at once
Penalty = Callable[[Tensor], Tensor]
"""Vectors (N, B, T, width) to a number a row (N,), to be added to the mismatch."""


class Vectors:
    """Vectors in the places of one upload's tokens, moved so that their gradient comes closer to what was heard."""

    def __init__(self, ground: Ground, objective: Objective, penalty: Penalty | None, stream: torch.Generator) -> None:
        if ground.scene.is_next:
            raise AttackRefused(
                "gradients are matched for labels of sentences, and here the next token is predicted; text_map, dager "
                "and lookup read such uploads"
            )
        if bool((ground.labels < 0).any()):
            raise AttackRefused("gradients are matched for known labels, and this upload does not tell them")
        self._ground = ground
        self._matcher = Matcher(ground.vectors, [ground.bare] * TOGETHER, objective, often=False)
        self._penalty = penalty
        self._labels = F.one_hot(ground.labels, ground.scene.classes)[None].to(ground.table)
        self.spread = float(ground.table.std())
        length = ground.scene.length
        places = torch.arange(length, device=ground.table.device)
        self._filled = places < torch.tensor(ground.lengths, device=places.device)[:, None]
        start = torch.randn(len(ground.labels), length, ground.table.shape[1], generator=stream)
        self.now = self._fixed(self.spread * start.to(ground.table))

    def losses(self, vectors: Tensor) -> Tensor:
        """Return mismatch and penalty (N,) of vectors (N, B, T, width), float64."""
        losses = torch.cat([self._mismatch(some) for some in vectors.split(TOGETHER)])
        return losses if self._penalty is None else losses + self._penalty(vectors)

    def _mismatch(self, vectors: Tensor) -> Tensor:
        rows = torch.arange(len(vectors), device=vectors.device)
        labels = self._labels.expand(len(vectors), -1, -1)
        return self._matcher.select(rows)(vectors[:, :, None], labels)

    def descend(self, steps: int, rate: Callable[[int], float], each: Callable[[int, float], None]) -> float:
        """Make steps of Adam, keep the best point of them, and return the loss there; ``each``: told (step, loss)."""
        moved = self.now.clone().requires_grad_()
        adam = torch.optim.Adam([moved])
        lowest = float("inf")
        for step in range(steps):
            losses = self.losses(self._fixed(moved)[None]).sum()
            (slope,) = torch.autograd.grad(losses, moved)
            loss = float(losses.detach())
            if loss < lowest:
                lowest, self.now = loss, self._fixed(moved).detach().clone()
            moved.grad = slope.nan_to_num(0.0, 0.0, 0.0)
            adam.param_groups[0]["lr"] = rate(step) * self.spread
            adam.step()
            each(step, loss)
            if time_is_up():
                break
        return lowest

    def texts(self, vectors: Tensor) -> Texts:
        """Return the tokens whose vectors have the smallest angle to vectors (B, T, width)."""
        table = F.normalize(self._ground.table, dim=1)
        alike = F.normalize(vectors, dim=2) @ table.mT
        tokens = alike.masked_fill(~self._ground.scene.inner, -2.0).argmax(dim=2)
        tokens[:, 0] = START
        return Texts(torch.where(self._filled, tokens, PAD), self._ground.labels)

    def _fixed(self, vectors: Tensor) -> Tensor:
        """Vectors (B, T, width) with that of the beginning where it stands, and nothing behind the end."""
        first = self._ground.table[START].expand(len(vectors), 1, -1)
        return torch.cat([first, vectors[:, 1:]], dim=1) * self._filled[:, :, None]


def _restarts(
    scene: TextScene, victim: Victim, config: TagSettings | LampSettings | TextMapSettings, seed: int, tell: Progress
) -> Iterator[tuple[torch.Generator, Progress]]:
    """The random numbers of each restart, and whom it tells."""
    for restart in range(config.restarts):
        yield scene.stream(seed, config.name, victim, restart), one_of(tell, restart, config.restarts)


def looked_up(scene: TextScene, victim: Victim, config: LookupSettings, seed: int, progress: Progress) -> Reading:
    """Read the sentences behind one upload off the tables of tokens and positions."""
    lookup = read_lookup(scene, victim)
    language = Language.of(scene, config.language_model)
    ground = Ground.of(scene, victim)
    read = lookup.sentences(scene, victim.model.examples, language)
    return Reading((ground.sentences(Texts(read, ground.labels), 0.0, 1),), language.title)


def most_probable(scene: TextScene, victim: Victim, config: TextMapSettings, seed: int, progress: Progress) -> Reading:
    """Read the sentences behind one upload; the first start is at what the tables show, if they show anything."""
    model = victim.model
    if model.training is not None and model.training.optimizer == "adam" and model.protects_examples:
        raise AttackRefused(
            "what is most probable follows from the distribution of the upload, and that of noise behind Adam's steps "
            "is not known"
        )
    language = Language.of(scene, config.language_model)
    ground = Ground.of(scene, victim)
    climb = Climb(scene, victim, ground.soft, misfit, language)

    # Rounds of each of several starts, before the best of them goes on.
    trial = config.iterations // 4
    share = trial // len(ground.starts)
    before = [*(number * share for number in range(len(ground.starts))), trial]
    labels = ground.labels.clamp(min=0)  # where none is told, the search begins with the first
    attempts = []
    for restart, (stream, told) in enumerate(_restarts(scene, victim, config, seed, progress)):
        starts = [climb.at(Texts(ground.drawn(lengths, language, stream), labels)) for lengths in ground.starts]
        if restart == 0 and ground.lookup is not None and ground.lookup.places is not None:
            read = ground.lookup.sentences(scene, model.examples, language)
            starts[-1] = _better(starts[-1], climb.at(Texts(read, labels)))
        tells = [counted(told, made, trial + config.iterations) for made in before]
        ended = climb.climb(_most_promising(climb, starts, share, tells[:-1]), config.iterations, tells[-1])
        for _ in range(config.kicks):
            if ended.rounds >= config.iterations or time_is_up():
                break
            again = climb.climb(climb.kicked(ended, stream), config.iterations, tells[-1])
            ended = replace(_better(ended, again), rounds=again.rounds)
        attempts.append(ground.sentences(ended.texts, ended.loss, ended.rounds))
    return Reading(tuple(attempts), language.title)


def _better(one: SearchState, other: SearchState) -> SearchState:
    return min(one, other, key=lambda reached: reached.loss)


def _most_promising(climb: Climb, starts: Sequence[SearchState], rounds: int, tells: Sequence[Tell]) -> SearchState:
    """Where the best of several starts is after so many rounds; the only one stays where it is."""
    if len(starts) == 1:
        return starts[0]
    made = [climb.climb(start, rounds, tell) for start, tell in zip(starts, tells, strict=True)]
    return replace(reduce(_better, made), rounds=0)


def nearest_vectors(scene: TextScene, victim: Victim, config: TagSettings, seed: int, progress: Progress) -> Reading:
    """Read the sentences behind one upload, as the tokens nearest to vectors that match it."""
    ground = Ground.of(scene, victim)

    def rate(step: int) -> float:
        return config.learning_rate * (1 - step / config.iterations)

    attempts = []
    for stream, tell in _restarts(scene, victim, config, seed, progress):
        vectors = Vectors(ground, squared_and_absolute(config.alpha), None, stream)
        loss = vectors.descend(config.iterations, rate, counted(tell, 1, config.iterations))
        attempts.append(ground.sentences(vectors.texts(vectors.now), loss, config.iterations))
    return Reading(tuple(attempts))


FALL, FALLS = 0.89, 50  # the learning rate is multiplied by the first each so many steps


def vectors_and_orders(
    scene: TextScene, victim: Victim, config: LampSettings, seed: int, progress: Progress
) -> Reading:
    """Read the sentences behind one upload."""
    language = Language.of(scene, config.language_model)
    ground = Ground.of(scene, victim)
    restarts = _restarts(scene, victim, config, seed, progress)
    return Reading(tuple(_attempt(ground, language, config, *each) for each in restarts), language.title)


def _attempt(
    ground: Ground, language: Language, config: LampSettings, stream: torch.Generator, progress: Progress
) -> Sentences:
    objectives = {"cosine": tensor_angle, "whole": angle, "distance": squared_and_absolute(config.alpha)}
    objective = objectives[config.objective]
    vectors = Vectors(ground, objective, _length(ground.table, config.length), stream)
    loss, done = float("inf"), 0

    def rate(step: int) -> float:
        return config.learning_rate * FALL ** ((done + step) // FALLS)

    while done < config.iterations and not (done and time_is_up()):
        steps = min(config.every, config.iterations - done)
        vectors.descend(steps, rate, counted(progress, done + 1, config.iterations))
        done += steps
        loss = _reorder(vectors, language, config, stream)
    return ground.sentences(vectors.texts(vectors.now), loss, done)


def _reorder(vectors: Vectors, language: Language, config: LampSettings, stream: torch.Generator) -> float:
    """Take the best of some orders by mismatch and language model, or the order as it is; return its loss."""
    now = vectors.now
    lengths = (now != 0).any(dim=2).sum(dim=1).tolist()
    tried = torch.stack([now, *(reordered(now, lengths, stream) for _ in range(config.orders))])
    with torch.no_grad():
        losses = vectors.losses(tried)
    for number, batch in enumerate(tried):
        tokens = vectors.texts(batch).tokens
        losses[number] += config.language * float(language.surprise(tokens).sum()) / sum(lengths)
    best = int(losses.nan_to_num(torch.inf).argmin())
    vectors.now = tried[best].clone()
    return float(losses[best])


def reordered(vectors: Tensor, lengths: list[int], stream: torch.Generator) -> Tensor:
    """Return vectors (B, T, width) with two of one sentence exchanged, or one, or some in a row, moved elsewhere."""
    made = vectors.clone()
    one = int(torch.randint(len(lengths), (), generator=stream))
    if lengths[one] < 3:
        return made
    kind, first, second, third = (int(torch.randint(1, top, (), generator=stream)) for top in (4, *[lengths[one]] * 3))
    order = list(range(lengths[one]))
    if kind == 1:
        order[first], order[second] = order[second], order[first]
    else:
        begin, end = sorted((first, third)) if kind == 3 else (first, first)
        taken, rest = order[begin : end + 1], order[:begin] + order[end + 1 :]
        place = min(second, len(rest))
        order = rest[:place] + taken + rest[place:]
    made[one, : lengths[one]] = vectors[one, torch.tensor(order, device=vectors.device)]
    return made


def _length(table: Tensor, weight: float) -> Penalty:
    """The squared distance of the vectors' mean length from that of all tokens', as a share of the latter."""
    usual = table.norm(dim=1).mean()

    def penalty(vectors: Tensor) -> Tensor:
        filled = (vectors != 0).any(dim=3)
        lengths = vectors.square().sum(dim=3).clamp(min=1e-20).sqrt() * filled
        mean = lengths.sum(dim=(1, 2)) / filled.sum(dim=(1, 2))
        away: Tensor = mean / usual - 1
        return weight * away.square().double()

    return penalty


def simulated_texts(trial: SimulationTrial) -> Vector:
    """As attacks that run the network itself on tokens take it."""
    scene, victim = _scene(trial)
    tokens, targets = split(scene, trial.examples, trial.labels)
    return trained_upload(
        victim, len(tokens), lambda now, rows: scene.gradient(now, tokens[list(rows)], targets[list(rows)])
    )


def simulated_probabilities(trial: SimulationTrial) -> Vector:
    """As attacks that move probabilities of tokens take it."""
    scene, victim = _scene(trial)
    vocabulary = scene.format.vocabulary
    soft = soft_network(trained_network(scene, victim), vocabulary, "probabilities")
    dtype = next(iter(victim.parameters.values())).dtype
    inputs, labels = soft_batch(scene, F.one_hot(trial.examples, vocabulary).to(dtype)[None], trial.labels[None])
    return simulated_upload(soft, victim, inputs[0], labels[0])


def simulated_vectors(trial: SimulationTrial) -> Vector:
    """As attacks that move vectors of tokens take it: without what these are looked up in."""
    scene, victim = _scene(trial)
    vocabulary = scene.format.vocabulary
    network = trained_network(scene, victim)
    vectors = soft_network(network, vocabulary, "vectors")
    table = token_vectors(network, vocabulary)
    probabilities = F.one_hot(trial.examples, vocabulary).to(table)
    _, labels = soft_batch(scene, probabilities[None], trial.labels[None])
    tokens, _ = split(scene, trial.examples, trial.labels)
    inputs = table[tokens] * (tokens != PAD)[:, :, None]
    return simulated_upload(
        vectors, without(victim, lookup_parameters(network, vocabulary)), inputs[:, None], labels[0]
    )


def _scene(trial: SimulationTrial) -> tuple[TextScene, Victim]:
    settings = trial.observation.settings
    if settings.text is None:
        raise ValueError("the trial is not of texts")
    scene = TextScene.of(trial.model, settings.shape, settings.classes, settings.text, None)
    return scene, trial.victim(scene.names)
