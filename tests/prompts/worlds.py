"""PromptTexts with labels that tests make prompts of."""

from fedpriv.core.randomness import Secret
from fedpriv.prompts.classify import Classifier
from fedpriv.prompts.language import Counting, LanguageModel
from fedpriv.prompts.settings import IclConfig
from fedpriv.prompts.texts import Example, PromptTexts, Wording

__all__ = ["classifier", "fruits"]

WORDS = ("red", "green", "sweet", "sour", "round", "long", "big", "small")


def fruits(examples: int = 60, questions: int = 20) -> PromptTexts:
    """Texts of three words each; the label is whether the first is among the first four."""

    def text(number: int) -> Example:
        words = [WORDS[number * step % len(WORDS)] for step in (1, 3, 5)]
        return Example(" ".join([*words, f"n{number}"]), int(number % len(WORDS) < 4))

    both = [text(number) for number in range(examples + questions)]
    return PromptTexts("fruits", tuple(both[:examples]), tuple(both[examples:]), ("no", "yes"), "Text", "Answer")


def classifier(
    config: IclConfig, texts: PromptTexts | None = None, language: LanguageModel | None = None
) -> Classifier:
    """Who answers, with a secret of its own."""
    return Classifier(language or Counting(), Wording(texts or fruits(), 40), config, Secret.of_seed(5), 5)
