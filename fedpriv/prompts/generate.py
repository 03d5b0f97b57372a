"""Synthetic examples, token by token (Tang et al., "Privacy-preserving in-context learning with differentially private
few-shot generation", ICLR 2024).

For each token of a synthetic example of a label, M prompts of N examples of that label are drawn afresh. Each gives a
distribution over the K tokens that are likeliest without private examples; the token with the largest mean probability
after normal noise is written. If one example is replaced, one of M distributions becomes any other: the mean moves by
sqrt(2) / M at most. Who draws a fixed number from all examples has replace-one, so that is the adjacency here, where
the paper claims Poisson draws. What was written serves any number of questions.
"""

from dataclasses import dataclass

import numpy as np

from fedpriv.accounting.aggregators import SENSITIVITY, SampledUse
from fedpriv.core.randomness import Secret
from fedpriv.prompts.classify import VoteNoise
from fedpriv.prompts.language import Floats, LanguageModel
from fedpriv.prompts.settings import IclConfig
from fedpriv.prompts.texts import Example, PromptTexts, Wording, check_enough, drawn

_ENDS = ("\n", "")  # an example is one line


@dataclass(frozen=True)
class Writer:
    """Who writes synthetic examples."""

    language: LanguageModel  # the model
    wording: Wording  # of prompts; its texts are the examples
    config: IclConfig  # of prompts, tokens and candidates
    secret: Secret  # draws examples and noise

    def example(self, label: int, number: int, sigma: float) -> Example:
        """Write one synthetic example."""
        own = [example for example in self.wording.texts.examples if example.label == label]
        public, written = self._instruction(label), ""
        for token in range(self.config.tokens):
            stream = self.secret.stream("icl-tokens", label, number, token)
            ending = f"{self._begun(label)}{written}"
            likeliest = self.language.likeliest(public + ending, self.config.likeliest)
            # Tokens that differ as texts; bytes of a character do not.
            candidates = tuple(dict.fromkeys(token for token in likeliest if "\ufffd" not in token))
            prefixes = [
                public + "".join(f"{self._begun(label)} {self.wording.cut(own[row].text)}\n\n" for row in rows)
                for rows in drawn(len(own), self.config.prompts, self.config.shots, stream.numpy())
            ]
            scores = self.language.after(prefixes, [ending], candidates)[:, 0]
            chosen = candidates[_decided(scores, sigma, stream.numpy())]
            if any(end in chosen if end else not chosen for end in _ENDS):
                break
            written += chosen
        return Example(written.strip(), label)

    def _instruction(self, label: int) -> str:
        texts = self.wording.texts
        return f"Examples of a {texts.text_word.lower()} with the {texts.label_word.lower()} {texts.labels[label]}.\n\n"

    def _begun(self, label: int) -> str:
        texts = self.wording.texts
        return f"{texts.label_word}: {texts.labels[label]}\n{texts.text_word}:"


def noise_of_label(config: IclConfig, texts: PromptTexts, label: int) -> VoteNoise:
    """Return the least noise with which all synthetic examples of a label keep to the target.

    Labels are public and each has examples of its own, so that what is proven for each is proven for all.
    """
    count = sum(example.label == label for example in texts.examples)
    check_enough(count, config.prompts, config.shots)
    use = SampledUse(SENSITIVITY, config.prompts * config.shots / count, config.synthetic * config.tokens, config.delta)
    sigma = use.least_sigma(config.target_epsilon)
    return VoteNoise(config.target_epsilon, sigma, use.guarantee(sigma))


def _decided(scores: Floats, sigma: float, generator: np.random.Generator) -> int:
    """The candidate with the largest sum of probabilities after noise."""
    shares = np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))
    return int(np.argmax(shares.sum(axis=0) + generator.normal(0.0, sigma, shares.shape[1])))
