"""The referee of sentences: compares those that an attack read with the true ones, token by token.

A sentence counts as recovered where all its tokens are read in their order, and no guess that never saw the upload is
the same sentence.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedpriv.attacks.baselines import Guess
from fedpriv.attacks.intervals import binomial_upper
from fedpriv.attacks.reconstruction.results import Reconstruction
from fedpriv.attacks.referee import UNMADE, Scores, Truth, bare, scored
from fedpriv.attacks.texts.scene import padded
from fedpriv.core.names import END, START
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import Score, SentenceScore

# How well sentences were read: ROUGE over tokens, exact sentences, and which sentence goes with which.
#
# A token is one of the run's tokenizer: a word, a piece of one, or a byte. Those that begin, end or pad a text are left
# out, here and in all figures. ROUGE is that of Lin 2004 as torchmetrics computes it, as an F-measure with beta = 1.


_KEYS = ("rouge1", "rouge2", "rougeL")


def sentence_score(true: Sequence[int], made: Sequence[int]) -> SentenceScore:
    """Compare a sentence with the true one, as :func:`bare` returns both."""
    from torchmetrics.functional.text.rouge import rouge_score  # seconds to import

    given, wanted = (" ".join(map(str, tokens)) for tokens in (made, true))
    figures = rouge_score(given, wanted, rouge_keys=_KEYS, normalizer=str, tokenizer=str.split)
    one, two, longest = (float(figures[f"{key}_fmeasure"]) for key in _KEYS)
    right = sum(token == other for token, other in zip(true, made, strict=False))
    return SentenceScore(one, two, longest, right, len(true), list(true) == list(made))


def likeness(true: Sequence[int], made: Sequence[int]) -> float:
    """Return how alike two sentences are, from 0 to 1: the mean of the shares of tokens in both, and in both places."""
    total = len(true) + len(made)
    if total == 0:
        return 1.0
    shared = (Counter(true) & Counter(made)).total()
    placed = sum(token == other for token, other in zip(true, made, strict=False))
    return (shared + placed) / total


def pairs(true: Sequence[Sequence[int]], made: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return which sentence goes with which true one: one to one, by the highest total likeness."""
    if not true or not made:
        return {}
    alike = np.array([[likeness(one, other) for other in made] for one in true])
    rows, columns = linear_sum_assignment(alike, maximize=True)
    return dict(zip(rows.tolist(), columns.tolist(), strict=True))


_NO_LPIPS = "it is for pictures, these are sentences"
# fields that sentences do not have
_NO_PICTURE: Mapping[str, Any] = dict.fromkeys(("mse", "mse_normalised", "psnr", "ssim", "lpips"))


def score_sentences(reconstruction: Reconstruction, upload: str, truth: Truth, guesses: Sequence[Guess]) -> Scores:
    """Score every restart of one reading; a true sentence for which nothing was offered counts as read as nothing."""
    if (reconstruction.round, reconstruction.client) != (truth.round, truth.client):
        raise ValueError("the reading and the truth are of different uploads")
    true = [bare(tokens) for tokens in truth.images]
    guessed = [bare(guess.image) for guess in guesses]
    lines: list[Score] = []
    pictures: dict[int, Tensor] = {}
    for restart, attempt in enumerate(reconstruction.attempts):
        chosen = restart == reconstruction.chosen
        made = [bare(tokens) for tokens in attempt.images]
        matched = pairs(true, made)
        offered, given = len(made), len(true)
        count = f"{offered} sentences read for {given} true ones" if offered != given else ""
        about: dict[str, Any] = {
            "attack": reconstruction.attack,
            "upload": upload,
            "restart": restart,
            "chosen": chosen,
            "note": "; ".join(text for text in (reconstruction.note, count) if text),
            "loss": attempt.loss,
            "offered": max(offered, given),
        }
        for number in range(given):
            place = matched.get(number)
            label = None if place is None or attempt.labels[place] == -1 else int(attempt.labels[place])
            read = [] if place is None else made[place]
            lines.append(_line(truth, number, read, label, guessed, about))
            if chosen and place is not None:
                pictures[number] = attempt.images[place]
    return Scores(tuple(lines), _NO_LPIPS, pictures)


def missed_sentences(truth: Truth, attack: str, upload: str, scores: Sequence[Score]) -> tuple[Score, ...]:
    """Return a line for each sentence of an upload that was refused; see :func:`fedpriv.attacks.referee.missed`."""
    if scores:
        return ()
    about = {**UNMADE, "attack": attack, "upload": upload, "offered": len(truth.images)}
    return tuple(_line(truth, number, [], None, [], about) for number in range(len(truth.images)))


def score_guessed_sentences(guesses: Sequence[Guess], truth: Truth) -> Scores:
    """Score the guesses as if they were readings; by definition none recovers anything.

    Other public sentences are paired with a batch's true ones as an attack's are; one sentence has none to be paired
    with.
    """
    lines = []
    count = len(truth.images)
    for guess in guesses:
        if guess.pool is not None and count == 1:
            continue
        offered = [bare(tokens) for tokens in guess.offer(truth.labels)]
        order = pairs([bare(tokens) for tokens in truth.images], offered) if guess.pool is not None else range(count)
        about = {**UNMADE, "attack": guess.name, "upload": "none", "offered": count if guess.pool is not None else 1}
        for number in range(count):
            made = offered[order[number]]
            lines.append(_line(truth, number, made, None, [made], about))
    return Scores(tuple(lines), _NO_LPIPS, {})


def _line(
    truth: Truth,
    number: int,
    made: list[int],
    label: int | None,
    guessed: Sequence[list[int]],
    about: Mapping[str, Any],
) -> Score:
    """Compare one sentence with the true one; ``about``: the fields that say of what it is."""
    true = bare(truth.images[number])
    words = sentence_score(true, made)
    rank, candidates = _rank(true, made, truth.others)
    recovered = words.exact and made not in guessed
    figures: dict[str, Any] = {"recovered": recovered, "rank": rank, "candidates": candidates, "words": words}
    return scored(truth, number, label, **_NO_PICTURE, **figures, **about)


def _rank(true: list[int], made: list[int], others: Tensor | None) -> tuple[int | None, int | None]:
    """The place of the original among others by likeness, and among how many without copies; ties count against."""
    if others is None:
        return None, None
    differing = [tokens for other in others if (tokens := bare(other)) != true]
    own = likeness(true, made)
    return 1 + sum(likeness(other, made) >= own for other in differing), 1 + len(differing)


# Sentences that somebody offers who never saw an upload: frequent tokens, a language model's sample, other texts.


PUBLIC_SEED = 0  # what a guess is depends on public texts alone, and is the same in every experiment
CONFIDENCE = 0.95
_BACK_OFF = 0.2  # how often the model looks at the last token only, or at none, though it knows more


def sentence_guesses(public: Tensor) -> tuple[Guess, ...]:
    """Return what public texts allow: the commonest tokens, a model's sample (Jelinek and Mercer 1980), the texts."""
    texts = [bare(tokens) for tokens in public]
    counts = Counter(token for text in texts for token in text)
    usual = round(float(np.median([len(text) for text in texts])))
    frequent = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:usual]]
    length = public.shape[-1]
    opening = [START] if bool((public[..., 0] == START).all()) else []  # packed sequences begin with any token
    made = {"guess-frequent": frequent, "guess-model": _sample(texts, length - len(opening))}
    same = [Guess(name, padded([[*opening, *tokens]], length)[0, None, None]) for name, tokens in made.items()]
    return (*same, Guess("guess-drawn", same[0].image, pool=public))


def exact_chance(public: Tensor, guesses: Sequence[Guess]) -> float:
    """Return an estimate of how often the best constant sentence is exactly right, from above.

    The sentence that is most frequent in one half of the public texts, and each guess, is counted in the other
    half; of each the upper Clopper-Pearson limit is taken, at a confidence that holds for all together
    (Bonferroni). It is 1 where there are fewer than two texts.
    """
    texts = [tuple(bare(tokens)) for tokens in public]
    offered, tried = texts[::2], texts[1::2]
    if not tried:
        return 1.0
    common = Counter(offered).most_common(1)[0][0]
    counts = Counter(tried)
    constant = [common, *(tuple(bare(guess.image)) for guess in guesses if guess.pool is None)]
    hits = max(counts[sentence] for sentence in constant)
    return binomial_upper(hits, len(tried), (1 - CONFIDENCE) / len(constant))


def _sample(texts: Sequence[Sequence[int]], longest: int) -> list[int]:
    """A sentence drawn from counts of what follows one or two tokens."""
    follow: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for text in texts:
        tokens = [START, *text, END]
        for place in range(1, len(tokens)):
            for known in range(3):
                if known <= place:
                    follow[tuple(tokens[place - known : place])].append(tokens[place])
    stream = numpy_stream(PUBLIC_SEED, "guessed sentence")
    made = [START]
    while len(made) <= longest:
        known = next(size for size in (2, 1, 0) if tuple(made[len(made) - size :]) in follow or size == 0)
        size = max(0, known - int(stream.random() < _BACK_OFF))
        choices = follow[tuple(made[len(made) - size :]) if size else ()]
        token = choices[int(stream.integers(len(choices)))]
        if token == END:
            break
        made.append(token)
    return made[1:]
