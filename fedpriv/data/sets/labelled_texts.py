"""Public texts with labels: news, sentences, film reviews and messages."""

from fedpriv.core.registry import DATASETS
from fedpriv.data.texts import Corpus, TextColumns


@DATASETS.register
class AgNews(Corpus):
    """Titles and descriptions of news with their topics (Zhang, Zhao and LeCun 2015)."""

    name = "agnews"
    title = "AG News, topics of news"
    file = "agnews.csv.gz"
    columns = TextColumns("text", "label")
    labels = (("0", "World"), ("1", "Sports"), ("2", "Business"), ("3", "Technology"))


@DATASETS.register
class Cola(Corpus):
    """Sentences of publications on syntax (Warstadt, Singh and Bowman 2019).

    Tests are those of GLUE's development set, in and out of domain.
    """

    name = "cola"
    title = "CoLA, acceptable sentences"
    file = "cola.csv.gz"
    columns = TextColumns("sentence", "label")
    labels = (("0", "unacceptable"), ("1", "acceptable"))
    tests = ("dev", "dev_ood")


@DATASETS.register
class RottenTomatoes(Corpus):
    """Sentences of film reviews with their polarity (Pang and Lee 2005)."""

    name = "rotten_tomatoes"
    title = "Rotten Tomatoes, film reviews"
    file = "rotten_tomatoes.csv.gz"
    columns = TextColumns("sentence", "label")
    labels = (("0", "negative"), ("1", "positive"))


@DATASETS.register
class SmsSpam(Corpus):
    """Messages of people (Almeida, Gomez Hidalgo and Yamakami 2011).

    Repeats are left out, and the last ones are tests.
    """

    name = "sms_spam"
    title = "SMS Spam Collection, text messages"
    file = "sms_spam.csv.gz"
    columns = TextColumns("text", "label")
    labels = (("ham", "ham"), ("spam", "spam"))
    tests = ()
    has_repeats = True


@DATASETS.register
class Sst2(Corpus):
    """Phrases of film reviews to train with, sentences to test with (Socher et al. 2013)."""

    name = "sst2"
    title = "SST-2, phrases of film reviews"
    file = "sst2.csv.gz"
    columns = TextColumns("sentence", "label")
    labels = (("0", "negative"), ("1", "positive"))
