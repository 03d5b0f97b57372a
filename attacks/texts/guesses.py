"""Sentences that somebody offers who never saw an upload: frequent tokens, and a language model's sample."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.stats import binomtest
from torch import Tensor

from fedpriv.attacks.baselines import Guess
from fedpriv.attacks.texts.scene import padded
from fedpriv.attacks.texts.scores import bare
from fedpriv.core.names import END, START
from fedpriv.core.randomness import numpy_stream

__all__ = ["exact_chance", "sentence_guesses"]

PUBLIC_SEED = 0  # what a guess is depends on public texts alone, and is the same in every experiment
CONFIDENCE = 0.95
_BACK_OFF = 0.2  # how often the model looks at the last token only, or at none, though it knows more


def sentence_guesses(public: Tensor) -> tuple[Guess, ...]:
    """Return what public texts allow: the most frequent tokens, as many as in a usual text, and a sample of a model.

    The model counts triples of tokens, pairs, and tokens (Jelinek and Mercer 1980).

    Args:
        public: int64 (N, 1, 1, T) with N >= 1, texts of the same kind, none of the victims'.
    """
    texts = [bare(tokens) for tokens in public]
    counts = Counter(token for text in texts for token in text)
    usual = round(float(np.median([len(text) for text in texts])))
    frequent = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:usual]]
    length = public.shape[-1]
    opening = [START] if bool((public[..., 0] == START).all()) else []  # packed sequences begin with any token
    made = {"guess-frequent": frequent, "guess-model": _sample(texts, length - len(opening))}
    return tuple(Guess(name, padded([[*opening, *tokens]], length)[0, None, None]) for name, tokens in made.items())


def exact_chance(public: Tensor, guesses: Sequence[Guess]) -> float:
    """Return an estimate of how often the best constant sentence is exactly right, from above.

    The sentence that is most frequent in one half of the public texts, and each guess, is counted in the other half; of
    each the upper Clopper-Pearson limit is taken, at a confidence that holds for all together (Bonferroni).

    Args:
        public: int64 (N, 1, 1, T).
        guesses: of these texts.

    Returns:
        From 0 to 1; 1 where there are fewer than two texts.
    """
    texts = [tuple(bare(tokens)) for tokens in public]
    offered, tried = texts[::2], texts[1::2]
    if not tried:
        return 1.0
    common = Counter(offered).most_common(1)[0][0]
    counts = Counter(tried)
    constant = [common, *(tuple(bare(guess.image)) for guess in guesses)]
    level = 1 - (1 - CONFIDENCE) / len(constant)
    hits = max(counts[sentence] for sentence in constant)
    return float(binomtest(hits, len(tried)).proportion_ci(2 * level - 1, method="exact").high)


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
