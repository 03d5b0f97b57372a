"""``fedpriv probe --attack cloak`` on a finished run whose task is a group of classes: figures, pictures, words."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from fedpriv.attacks.endpoint.probe import probe_run
from fedpriv.attacks.endpoint.probes.cloak import CloakedQuestions
from fedpriv.attacks.endpoint.report import Probe
from fedpriv.attacks.probing import ModelAttack, ProbeResult
from fedpriv.core.errors import InputError
from fedpriv.core.progress import Silent
from fedpriv.core.report import load_view, render_page
from fedpriv.core.runs import RunFolder
from tests.service.test_lab_endpoint import finished

GROUPS = ((0, 1, 2, 3, 4, 5), (6, 7, 8, 9))
QUICK = {"steps": 15, "training": 15, "network": "lenet"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finished(tmp_path_factory.mktemp("cloak") / "run", data={"groups": GROUPS})


def probed(run: RunFolder, *attacks: ModelAttack, questions: int | None = None, who: str | None = None) -> Probe:
    return probe_run(run, attacks, None, questions, who, Silent())


def values(result: ProbeResult, words: str) -> Sequence[float | None]:
    figure = next(figure for figure in result.figures if figure.what.startswith(words))
    return figure.guess, figure.measured.value, figure.reference, figure.ceiling


def test_cloak_stands_beside_uniform_noise_and_claims_nothing(run: RunFolder) -> None:
    found = probed(run, CloakedQuestions(weights=(3.0,), threshold=0.74, **QUICK))
    assert found.adversary == "curious-endpoint" and found.heuristic
    assert [result.variant for result in found.results] == ["lambda 3", "lambda 3, suppressed above 0.74"]
    for result in found.results:
        assert result.queries == 0
        for words in ("attribute read", "right answers"):
            cloaked, uniform = (values(result, f"{words}, {kind}") for kind in ("cloaked", "uniform noise"))
            assert cloaked[0] == uniform[0] and cloaked[2] == uniform[2]
        assert all(figure.ceiling is None and "epsilon" not in figure.theorem for figure in result.figures)
    said = [text for result in found.results for text in result.sentences]
    assert said[-1] == "Cloak is a heuristic: nothing is proven." and "nothing is proven" not in " ".join(said[:-1])
    guess = values(found.results[0], "attribute read")[0]
    assert guess is not None and 0.15 < guess < 0.35  # the commonest of six digits, or of four
    assert values(found.results[0], "right answers")[0] == pytest.approx(0.6, abs=0.05)
    suppressed = values(found.results[1], "pixels suppressed")[1]
    assert suppressed is not None and 0 < suppressed <= 1
    text = " ".join(render_page(load_view(run.path)).split())
    assert "Reading cloaked questions (Cloak), lambda 3" in text and "every image that people ask about" in text
    assert text.count('alt="Cloaked: Test image 1"') == 2 and text.count('alt="Noise: White: the most"') == 2
    assert "nothing proven" in text and "Each figure lies between" not in text
    assert len(list((run.path / "probe").glob("cloak-*.png"))) == 20


def test_who_has_answers_alone_learns_from_a_copy(run: RunFolder) -> None:
    """The attribute may be another grouping: even or odd, which the answer tells nothing of."""
    parity = ((0, 2, 4, 6, 8), (1, 3, 5, 7, 9))
    settings = CloakedQuestions(weights=(3.0,), gradient="answers", attribute=parity, clamped=False, **QUICK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedpriv.attacks.endpoint.probes.extraction.LBFGS_STEPS", 20)
        result = probed(run, settings, questions=70).results[0]
    assert (result.variant, result.queries) == ("lambda 3, learnt from answers", 70)
    guess = values(result, "attribute read")[0]
    assert guess is not None and guess == pytest.approx(0.5, abs=0.08)


def test_an_attribute_that_is_the_task_and_another_adversary_are_refused(run: RunFolder) -> None:
    with pytest.raises(InputError, match=r"^cloak.attribute follows from the model's task: there is nothing to hide$"):
        probed(run, CloakedQuestions(attribute=GROUPS, **QUICK))
    with pytest.raises(InputError, match=r"cloak.attribute: class 5 is in no group; each of 0 to 9 is in one"):
        probed(run, CloakedQuestions(attribute=((0, 1, 2, 3, 4), (6, 7, 8, 9)), **QUICK))
    with pytest.raises(InputError, match="cloak needs the images that people ask the endpoint about, as they are"):
        probed(run, CloakedQuestions(**QUICK), who="participant")


def test_without_public_images_there_is_nothing_to_learn_from(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", data={"groups": GROUPS}, adversary={"knows_public_data": False})
    with pytest.raises(InputError, match="needs public images of the same kind, which the threat model"):
        probed(run, CloakedQuestions(**QUICK))
