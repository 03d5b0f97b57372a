"""SST-2, phrases of film reviews (Socher et al. 2013)."""

from fedpriv.core.registry import DATASETS
from fedpriv.data.texts import Corpus, TextColumns


@DATASETS.register
class Sst2(Corpus):
    """Phrases to train with, sentences to test with."""

    name = "sst2"
    title = "SST-2, phrases of film reviews"
    file = "sst2.csv.gz"
    columns = TextColumns("sentence", "label")
    labels = (("0", "negative"), ("1", "positive"))
