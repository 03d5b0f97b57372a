"""The SMS Spam Collection, text messages (Almeida, Gomez Hidalgo and Yamakami 2011)."""

from fedpriv.core.registry import DATASETS
from fedpriv.data.texts import Corpus, TextColumns


@DATASETS.register
class SmsSpam(Corpus):
    """Messages of people; repeats are left out, and the last ones are tests."""

    name = "sms_spam"
    title = "SMS Spam Collection, text messages"
    file = "sms_spam.csv.gz"
    columns = TextColumns("text", "label")
    labels = (("ham", "ham"), ("spam", "spam"))
    tests = ()
    has_repeats = True
