"""AG News, topics of news (Zhang, Zhao and LeCun 2015)."""

from fedpriv.core.registry import DATASETS
from fedpriv.data.texts import Corpus, TextColumns


@DATASETS.register
class AgNews(Corpus):
    """Titles and descriptions."""

    name = "agnews"
    title = "AG News, topics of news"
    file = "agnews.csv.gz"
    columns = TextColumns("text", "label")
    labels = (("0", "World"), ("1", "Sports"), ("2", "Business"), ("3", "Technology"))
