"""Tokens behind a gradient that no row space tells apart: few tokens occur, and the noise's distribution is public.

The gradient of a layer that sees single tokens is ``C X`` plus noise, X the inputs of all tokens and C zero for those
that do not occur. With low-rank adapters it has fewer rows than tokens occurred, and with noise every token lies a
little outside its row space. What is sought is the few rows of C that make the gradient most probable (sparse Bayesian
learning for several measurements, Wipf and Rao 2007). A search then puts the tokens in order by the whole gradient.
"""

from dataclasses import replace

import torch
from scipy.stats import chi2
from torch import Tensor

from fedpriv.attacks.reconstruction.posterior import misfit
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.texts.lookup import Lookup
from fedpriv.attacks.texts.scene import Reading, TextScene
from fedpriv.attacks.texts.scoring import HELD, Language, Texts
from fedpriv.attacks.texts.search import Climb, Ground
from fedpriv.core.names import PAD

ITERATIONS = 200  # of the fixed point, at most
SETTLED = 1e-3  # change of the strengths, of the largest
FLOOR = 1e-12  # of the largest strength: rounding alone
MOST = 4096  # tokens that are weighed together, those nearest to the gradient
FALSE = 1.0  # tokens that did not occur, of all that are tried, that count as found
BEAM = 32  # beginnings that are kept while tokens are put in a usual order


def present_tokens(gradient: Tensor, inputs: Tensor, deviation: float) -> Tensor:
    """Return the tokens of a gradient (rows, n) of noise of this deviation, those that explain most first."""
    heard, atoms = gradient.double(), torch.nn.functional.normalize(inputs.double(), dim=1)
    rows, width = heard.shape
    names = (heard @ atoms.mT).square().sum(dim=0).topk(min(MOST, len(atoms))).indices
    names = names[atoms[names].any(dim=1)]
    atoms = atoms[names].mT
    strengths = torch.full((len(names),), float(heard.square().sum()) / (rows * len(names))).to(heard)
    eye = torch.eye(width, dtype=heard.dtype, device=heard.device)

    def seen(strengths: Tensor) -> tuple[Tensor, Tensor]:
        """What the inverse covariance of a row leaves of each token, and of the gradient along it."""
        noise = max(deviation**2, FLOOR * float(strengths.max()))
        whitened = torch.linalg.solve(noise * eye + (atoms * strengths) @ atoms.mT, atoms)
        return (atoms * whitened).sum(dim=0), (heard @ whitened).square().sum(dim=0)

    for _ in range(ITERATIONS):
        own, along = seen(strengths)
        moved = strengths * (along / (rows * own)).sqrt()
        change = float((moved - strengths).abs().max() / moved.max())
        strengths = moved
        if change < SETTLED:
            break
    own, along = seen(strengths)
    # With the token itself left out of the covariance, chi-squared for one that does not occur.
    surprise = along / (own * (1 - strengths * own).clamp(min=1e-12))
    threshold = float(chi2.isf(min(FALSE / len(names), 0.5), rows))
    strengths = torch.where(surprise > threshold, strengths, 0.0)
    found: Tensor = names[strengths.argsort(descending=True, stable=True)[: int((strengths > 0).sum())]]
    return found


def read_in_order(scene: TextScene, victim: Victim, tokens: Tensor, rounds: int) -> Reading:
    """Put tokens in the order, and as often, as the whole upload and a language model of public texts say.

    Without noise the tokens are certain; with noise the search may exchange them.
    """
    if scene.public is not None and len(scene.public) < HELD:
        scene = replace(scene, public=None)
    language = Language.of(scene, "")
    ground = Ground.of(scene, victim)
    climb = Climb(scene, victim, ground.soft, misfit, language, None if victim.model.mechanism.protects else tokens)
    labels = ground.labels.clamp(min=0)
    count = victim.model.examples
    laid = Lookup(tokens, None, None).sentences(scene, count, language)
    usual = torch.stack([_usual_order(row, language, len(scene.opening)) for row in laid])
    starts = [climb.at(Texts(made, labels)) for made in (laid, usual)]
    ended = climb.climb(min(starts, key=lambda start: start.loss), rounds, lambda done, loss: None)
    note = f"{len(tokens)} tokens by the likelihood of the gradient, {ended.rounds} rounds of search; {language.title}"
    return Reading((ground.sentences(ended.texts, ended.loss, ended.rounds),), note)


def _usual_order(sentence: Tensor, language: Language, known: int) -> Tensor:
    """The tokens of a sentence (L,) in the order that is most usual, by a beam over positions."""
    tokens = sentence[sentence != PAD].tolist()
    start = max(known, 1)
    beams = [(0.0, tokens[:start], tokens[start:])]
    while beams[0][2]:
        chances = language.chances(torch.tensor([made for _, made, _ in beams], device=sentence.device))[:, -1]
        longer = [
            (loss - float(chances[number, token]), [*made, token], _one_less(rest, token))
            for number, (loss, made, rest) in enumerate(beams)
            for token in dict.fromkeys(rest)
        ]
        beams = sorted(longer, key=lambda beam: beam[0])[:BEAM]
    ordered = sentence.clone()
    ordered[: len(tokens)] = torch.tensor(beams[0][1], device=sentence.device)
    return ordered


def _one_less(tokens: list[int], token: int) -> list[int]:
    place = tokens.index(token)
    return tokens[:place] + tokens[place + 1 :]
