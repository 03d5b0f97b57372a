"""CoLA, which sentences are acceptable (Warstadt, Singh and Bowman 2019)."""

from fedpriv.core.registry import DATASETS
from fedpriv.data.texts import Corpus, TextColumns


@DATASETS.register
class Cola(Corpus):
    """Sentences of publications on syntax; tests are those of GLUE's development set, in and out of domain."""

    name = "cola"
    title = "CoLA, acceptable sentences"
    file = "cola.csv.gz"
    columns = TextColumns("sentence", "label")
    labels = (("0", "unacceptable"), ("1", "acceptable"))
    tests = ("dev", "dev_ood")
