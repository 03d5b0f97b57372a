"""Rotten Tomatoes, sentences of film reviews (Pang and Lee 2005)."""

from fedpriv.core.registry import DATASETS
from fedpriv.data.texts import Corpus, TextColumns


@DATASETS.register
class RottenTomatoes(Corpus):
    """Sentences with their polarity."""

    name = "rotten_tomatoes"
    title = "Rotten Tomatoes, film reviews"
    file = "rotten_tomatoes.csv.gz"
    columns = TextColumns("sentence", "label")
    labels = (("0", "negative"), ("1", "positive"))
