"""Membership by questions: signals of answers against those of the model, exact counts, ceilings from epsilon."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedpriv.accounting.ceiling import membership_advantage, membership_auc
from fedpriv.attacks.endpoint.probe import probe_run, proven_of
from fedpriv.attacks.endpoint.probes.attribute_inference import AttributeInference
from fedpriv.attacks.endpoint.probes.two_answers import TwoAnswers
from fedpriv.attacks.membership.attacks import label_logits, wrong_log_probabilities
from fedpriv.attacks.membership.probes.answers import (
    MembershipByAnswers,
    MembershipByLabels,
    MembershipBySynthesis,
    answer_signals,
    membership_figures,
    reference_answers,
)
from fedpriv.attacks.references import pairs_within
from fedpriv.core.errors import InputError
from fedpriv.core.progress import Silent
from fedpriv.core.records import Guarantee
from fedpriv.core.runs import RunFolder
from tests.service.named import named_policy
from tests.service.test_lab_endpoint import finished

QUICK = MembershipByAnswers(references=6, pairs=15, population=20)


@pytest.mark.parametrize("classes", [2, 4, 14])
def test_signals_of_exact_answers_are_those_of_the_model(classes: int) -> None:
    rng = np.random.default_rng(classes)
    logits, labels = 5 * rng.standard_normal((40, classes)), rng.integers(classes, size=40)
    told = answer_signals(reference_answers(None, logits), labels, classes)
    numbers, right = torch.from_numpy(logits), torch.from_numpy(labels)
    np.testing.assert_allclose(told.logits, label_logits(numbers, right).numpy(), atol=1e-9)
    np.testing.assert_allclose(told.others, wrong_log_probabilities(numbers, right).numpy(), atol=1e-9)


def test_signals_are_finite_whatever_a_policy_shows() -> None:
    rng = np.random.default_rng(0)
    logits, labels = 300 * rng.standard_normal((30, 3)), rng.integers(3, size=30)
    for name in ("none", "rounded:0", "rounded:2", "top:1", "label-only"):
        told = answer_signals(reference_answers(named_policy(name), logits), labels, 3)
        assert np.isfinite(told.logits).all() and np.isfinite(told.others).all()
        assert told.others.shape == (30, 2) and bool((told.others[:, 0] >= told.others[:, 1]).all())
    half = answer_signals(reference_answers(named_policy("rounded:1"), np.zeros((1, 3))), np.array([0]), 3)
    assert half.logits[0] == pytest.approx(np.log(1 / 3) - np.log(2 / 3))


def claim(epsilon: float) -> Guarantee:
    return Guarantee("replace-one: one example", "full", 1, None, epsilon, epsilon, 0.0, {}, ())


def test_figures_stand_between_a_guess_and_a_theorem() -> None:
    truth = np.arange(200) < 100
    rng = np.random.default_rng(1)
    scores = {"weak": rng.normal(size=200), "strong": rng.normal(size=200) + 3 * truth}
    strong, weak, advantage = membership_figures(scores, truth, claim(0.5), 3, raw=scores)
    assert strong.what == "AUC of strong" and strong.measured.value > 0.9 > weak.measured.value
    assert strong.guess == 0.5 and strong.ceiling == pytest.approx(membership_auc(0.5, 0.0))
    assert strong.exceeded and not weak.exceeded  # an attack that does better than proven refutes the claim
    assert strong.reference == strong.measured.value
    assert advantage.what == "advantage of strong" and advantage.measured.value > 0.7 and not advantage.exceeded
    unproven = membership_figures(scores, truth, None, 3)[0]
    assert unproven.ceiling is None and unproven.theorem == "no epsilon under replace-one is proven"


def test_each_question_is_counted_and_the_budget_holds(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    attacks = (QUICK, MembershipByLabels(pairs=15, noisy=4))
    found = probe_run(folder, attacks, "rounded:2", 100, "user", Silent())
    by_answers, by_labels = found.results
    assert by_answers.queries == 2 * 15 + 20 and by_labels.queries == 2 * 10 * 5
    names = [figure.what for figure in by_answers.figures]
    assert {"AUC of lira-online", "AUC of shadow"} <= set(names) and "AUC of lira-rounds" not in names
    assert all(figure.ceiling is None for figure in by_answers.figures)
    assert all(figure.reference is not None for figure in by_answers.figures[:-1])
    exact = probe_run(folder, [QUICK], "none", 100, "user", Silent()).results[0]
    raw = {figure.what: figure.reference for figure in by_answers.figures[:-1]}
    # Exact answers are the network's in float32, what they are compared with is in float64.
    assert {figure.what: figure.measured.value for figure in exact.figures[:-1]} == pytest.approx(raw, abs=0.02)


def test_a_private_run_has_a_ceiling(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", mechanism={"name": "gaussian", "sigma": 3.0})
    found = probe_run(folder, [QUICK], None, 80, "user", Silent())
    ledger = folder.final_ledger().worst
    assert ledger.epsilon is not None and ledger.adjacency.startswith("replace")
    assert found.results[0].figures[0].ceiling == pytest.approx(membership_auc(ledger.epsilon, ledger.delta))
    assert not any(each.exceeded for each in found.figures)
    experiment, network = folder.experiment(), SimpleNamespace(claim=None, rule=SimpleNamespace(source="network"))
    assert proven_of(network, experiment, folder.final_ledger()) == ledger  # type: ignore[arg-type]
    copies = SimpleNamespace(data=SimpleNamespace(overlaps=True))
    assert proven_of(network, copies, folder.final_ledger()) is None  # type: ignore[arg-type]


def test_what_cannot_be_played_is_refused(tmp_path: Path) -> None:
    service = {"method": "label", "target_epsilon": 1.0, "answers": 50}
    folder: RunFolder = finished(tmp_path / "run", mechanism={"name": "gaussian", "sigma": 100.0}, service=service)
    with pytest.raises(
        InputError, match="trains references of the run's network, and this policy answers from its head"
    ):
        probe_run(folder, [QUICK], None, 50, "user", Silent())
    with pytest.raises(InputError, match=r"references = 7: an even number from 6"):
        probe_run(folder, [MembershipByAnswers(references=7)], "none", 50, "user", Silent())
    with pytest.raises(InputError, match=r"--queries 51: the run's endpoint answers service.answers = 50 at most"):
        probe_run(folder, [MembershipByLabels()], None, 51, "user", Silent())
    found = probe_run(folder, [MembershipByLabels(noisy=4)], None, 50, "user", Silent())
    assert found.results[0].queries == 50 and not found.heuristic
    # The network's epsilon is smaller, and says nothing of the head.
    assert (folder.final_ledger().worst.epsilon or 1.0) < 0.5
    assert found.results[0].figures[0].ceiling == pytest.approx(membership_auc(1.0, 1e-5), abs=1e-3)
    with pytest.raises(InputError, match="3 questions are too few: two pairs of candidates take 4"):
        pairs_within(3, 10)


def test_shadows_on_made_data_and_hidden_features_keep_to_the_budget(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", mechanism={"name": "gaussian", "sigma": 3.0})
    attacks = (
        MembershipBySynthesis(references=3, pairs=12, records=40),
        AttributeInference(features=3, pairs=8),
    )
    found = probe_run(folder, attacks, "none", 200, "user", Silent())
    search, statistics, noisy, hidden = found.results
    assert search.queries <= 200 and statistics.queries == 40 + 24 and noisy.queries == 24
    assert all(result.figures[0].guess == 0.5 for result in (statistics, noisy))
    assert hidden.queries == 2 * 8 * 3 * 2
    members, others, advantage = hidden.figures
    assert advantage.measured.value == pytest.approx(members.measured.value - others.measured.value)
    ledger = folder.final_ledger().worst
    assert ledger.epsilon is not None
    assert advantage.ceiling == pytest.approx(membership_advantage(ledger.epsilon, ledger.delta))


def test_two_answers_unmask_noise_on_one_score(tmp_path: Path) -> None:
    """Recovered are 1 - 1/10 of the vectors; of 200 at least 160, four standard deviations below (false alarm 1e-5)."""
    service = {"method": "paper", "epsilon_each": 1.0, "answers": 400}
    folder = finished(tmp_path / "run", service=service)
    (result,) = probe_run(folder, [TwoAnswers(images=200)], None, 400, "user", Silent()).results
    assert result.queries == 2 * 180 and result.figures[0].measured.value > 0.8 > 0.2 > (result.figures[0].guess or 0)
    with pytest.raises(InputError, match="takes noise off probabilities"):
        probe_run(folder, [TwoAnswers()], "none", 400, "user", Silent())
