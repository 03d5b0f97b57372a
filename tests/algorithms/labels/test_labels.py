"""Label privacy in whole runs: labels change once, the ledger says so, and attacks are scored against true ones."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from torch.nn import functional

from fedpriv.accounting.response import Response
from fedpriv.algorithms.labels.preparation import ChangedLabels
from fedpriv.algorithms.labels.report import LabelsFinding
from fedpriv.algorithms.labels.survey import LabelsTold, read_survey, survey_of
from fedpriv.attacks.references import build_pool
from fedpriv.clients.answering import Answering, _RunKey
from fedpriv.clients.cohort import Cohort
from fedpriv.core.algorithm import preparation_of
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.federated import example_losses
from fedpriv.core.lab import attack_run, resume_run, start_run
from fedpriv.core.lab.preflight import warnings_for
from fedpriv.core.lab.victims import targets, truth
from fedpriv.core.progress import Silent
from fedpriv.core.randomness import Secret
from fedpriv.core.report import load_view, render_page
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World, build_world
from tests.integration.small import experiment, left_behind


def labelled(epsilon: float = 1.0, **sections: dict[str, object]) -> Experiment:
    """The small experiment with labels that clients change."""
    return experiment(data={"label_epsilon": epsilon, **sections.pop("data", {})}, **sections)


ATTACKED = {"attacks": ["idlg"], "victims": 2, "rounds": [1]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("labels") / "run"
    start_run(labelled(training={"batch_size": 1}, adversary=ATTACKED), path, "fedpriv run x", Silent())
    return path


def world_of(path: Path) -> World:
    folder = RunFolder.open(path)
    return build_world(folder.experiment(), folder.secret(folder.experiment()))


def test_labels_are_changed_once_by_each_clients_own_stream(finished: Path) -> None:
    world = world_of(finished)
    again = build_world(world.experiment, Secret.of_seed(world.experiment.seed))
    assert torch.equal(world.dataset.y_train, again.dataset.y_train)
    other = build_world(world.experiment, Secret.drawn())
    assert not torch.equal(world.dataset.y_train, other.dataset.y_train)
    kept = (world.dataset.y_train == world.true_labels).double().mean()
    assert 0.1 < kept < 0.4  # 0.23 of 1,437; 0.1 and 0.4 are 11 standard deviations off
    _, first = world.examples(0, np.arange(5))
    assert torch.equal(first, world.dataset.y_train[torch.from_numpy(world.partitions[0][:5])])


def test_the_claim_says_what_is_taken_as_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes that are read off the labels, and weights that may have been learnt from them."""
    world = build_world(labelled())
    read_off = replace(world, dataset=replace(world.dataset, notes=("The classes were read off.",)))
    claim = ChangedLabels().claim
    assert claim(read_off).notes[-1] == "The classes were read off." != claim(world).notes[-1]
    assert "data: the classes were read off." in warnings_for(read_off)
    for file, said in (("weights.safetensors", True), ("config.json", False)):
        monkeypatch.setattr(type(world.experiment.model), "files", lambda *_, name=file: (Path(name),))
        notes = claim(replace(world, dataset=world.dataset)).notes
        assert any("no figure covers the data that they were learnt from" in note for note in notes) == said


def test_without_the_key_nothing_is_another() -> None:
    plain = build_world(experiment())
    assert preparation_of(plain.experiment) is None
    assert plain.true_labels is plain.dataset.y_train
    assert "label" not in json.dumps(plain.experiment.decisive())
    assert "label_" not in plain.experiment.to_toml()


def test_the_ledger_has_a_line_of_its_own(finished: Path) -> None:
    ledger = json.loads((finished / "ledger.json").read_text())
    assert ledger["labels"]["pure_epsilon"] == 1.0
    assert ledger["labels"]["participations"] == 1
    assert ledger["labels"]["adjacency"].startswith("replace-label")
    assert ledger["worst"]["epsilon"] is None  # no mechanism: nothing is proven of whole examples
    assert "labels" not in json.loads(json.dumps(RunFolder.open(finished).final_ledger().worst.__dict__, default=str))


def test_the_survey_is_of_what_clients_count(finished: Path) -> None:
    world, survey = world_of(finished), read_survey(RunFolder.open(finished))
    assert survey is not None
    assert survey.clients == (0, 1, 2, 3)
    for client, counts in zip(survey.clients, survey.counts, strict=True):
        own = world.dataset.y_train.numpy()[world.partitions[client]]
        assert list(counts) == np.bincount(own, minlength=10).tolist()
    shares, errors = Response(1.0, 10).shares(np.sum(survey.counts, axis=0).tolist())
    assert survey.shares == tuple(shares)
    assert survey.standard_errors == tuple(errors)
    assert survey_of(Response(1.0, 10), {}).shares == ()


def test_measured_lies_between_a_guess_and_the_ceiling(finished: Path) -> None:
    world, told = world_of(finished), read_survey(RunFolder.open(finished)).told  # type: ignore[union-attr]
    assert told is not None
    true = world.true_labels.numpy()
    assert told.guess == pytest.approx(np.bincount(true).max() / len(true))
    assert told.kept == int((world.true_labels == world.dataset.y_train).sum())
    assert told.low <= told.ceiling <= Response(1.0, 10).keep + 1e-9
    assert told.guess < told.right / told.examples < told.high


def test_attacks_are_scored_against_the_true_labels(finished: Path) -> None:
    """idlg reads the changed label off a batch of one exactly; it is right where that was kept."""
    world, folder = world_of(finished), RunFolder.open(finished)
    scores = [score for score in folder.scores() if score.chosen and score.attack == "idlg"]
    assert len(scores) == 2
    for score in scores:
        row = int(world.uploaded_rows(score.client, score.round)[0])
        assert score.true_label == int(world.true_labels[row])
        assert score.label == int(world.dataset.y_train[row])
        assert score.label_correct == (score.label == score.true_label)
    known = truth(world, targets(world, folder)[0])
    assert torch.equal(known.used, world.dataset.y_train[world.uploaded_rows(known.client, 1)])


def test_the_report_has_a_section(finished: Path) -> None:
    page = render_page(load_view(finished))
    assert '<a href="#labels">Labels</a>' in page
    for words in ('id="labels"', "Proven ε of each label", "Guess of a label", "Proven: at most", "replace-label"):
        assert words in page


def test_a_killed_run_ends_with_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    before = left_behind(copy)
    resume_run(copy, Silent())
    assert left_behind(copy) == before


def test_another_attack_keeps_the_sentence_about_labels(finished: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    before = RunFolder.open(copy).final_summary().verdict
    after = attack_run(copy, ["idlg"], [], [], None, "", Silent()).verdict
    assert [text for text in after if "Labels were changed once" in text]
    assert after == before


def test_words_about_a_measured_rate_above_the_ceiling() -> None:
    """Chance lifts it a little; the sentence says that both agree, and nothing where it lies below."""
    told = {"examples": 1000, "kept": 450, "low": 0.42, "high": 0.49, "guess": 0.11, "ceiling": 0.451}
    texts = []
    for right in (455, 440):
        survey = survey_of(Response(2.0, 10), {})
        known = LabelsTold(**told, right=right, true_shares=(0.1,) * 10)
        (text,) = LabelsFinding().sentences(survey.model_copy(update={"told": known}))
        texts.append(text)
    assert "49.0%), which agrees within its interval with the ceiling, 45.1% for anyone who" in texts[0]
    assert "49.0%), the ceiling 45.1% for anyone who" in texts[1]
    assert texts[1].endswith("a party that already guesses 90% of labels from the features can reach 98.5%.")


def test_the_smallest_epsilon_has_a_finite_survey() -> None:
    survey = survey_of(Response(1e-9, 10), {0: [3] * 10})
    assert np.isfinite([*survey.shares, *survey.standard_errors]).all()


def test_a_deployed_client_changes_labels_by_a_secret_of_its_own() -> None:
    """The server's world has other labels, and the client's stay the same from round to round."""
    settings = labelled().model_copy(update={"noise": "secret"})
    alone = Answering(None, None, Cohort())
    known = _RunKey(settings.model_dump_json(), "", None, None, 1)
    world = alone._own_world(Context(1, 2, {"partition-id": 1}, RecordDict(), {}), known)
    context = Context(1, 2, {"partition-id": 1}, RecordDict(), {})
    first, again = (alone._own_world(context, known) for _ in range(2))
    rows = torch.from_numpy(first.partitions[1])
    assert torch.equal(first.dataset.y_train[rows], again.dataset.y_train[rows])
    assert not torch.equal(first.dataset.y_train[rows], world.dataset.y_train[rows])
    assert isinstance(context.state.config_records["memory"], ConfigRecord)


def test_behind_a_mechanism_nobody_counts_labels(tmp_path: Path) -> None:
    """Counts would be a second release of each example, which the mechanism's claim does not cover."""
    mechanism = {"name": "gaussian", "sigma": 1.0}
    start_run(labelled(mechanism=mechanism, federation={"rounds": 1}), tmp_path / "run", "", Silent())
    folder = RunFolder.open(tmp_path / "run")
    survey, ledger = read_survey(folder), folder.final_ledger()
    assert survey is not None
    assert (survey.counts, survey.shares) == ((), ())
    assert survey.told is not None
    assert ledger.labels is not None
    plain = tmp_path / "plain"
    start_run(experiment(mechanism=mechanism, federation={"rounds": 1}), plain, "", Silent())
    assert ledger.worst.epsilon == RunFolder.open(plain).final_ledger().worst.epsilon


def test_a_client_that_miscounts_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = World.class_counts_of

    def lying(world: World, labels: torch.Tensor, client: int) -> list[int]:
        counts = honest(world, labels, client)
        return [counts[0] + 1, *counts[1:]] if client == 2 else counts

    monkeypatch.setattr(World, "class_counts_of", lying)
    start_run(labelled(federation={"rounds": 1}), tmp_path / "run", "", Silent())
    (failure,) = RunFolder.open(tmp_path / "run").rounds()[-1].failures
    assert failure.client == 2
    assert "labels in 10 classes; it holds" in failure.reason


def test_the_forward_loss_is_that_of_the_changed_label() -> None:
    """Against the matrix of the law, and its gradient against autograd of that."""
    law = Response(0.7, 5)
    table = torch.full((5, 5), law.other, dtype=torch.float64) + torch.eye(5) * (law.keep - law.other)
    outputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    labels = torch.arange(8) % 5
    ours = example_losses(outputs, labels, law)
    literal = -(functional.softmax(outputs, 1) @ table).log()[torch.arange(8), labels]
    torch.testing.assert_close(ours, literal)
    gradients = [torch.autograd.grad(each.sum(), outputs, retain_graph=True)[0] for each in (ours, literal)]
    torch.testing.assert_close(*gradients)
    wild = torch.tensor([[900.0, -900.0]])
    assert example_losses(wild, torch.tensor([1]), Response(20.0, 2)).isfinite().all()


def test_forward_trains_and_outsiders_labels_are_changed_too(tmp_path: Path) -> None:
    settings = labelled(training={"label_correction": "forward"}, federation={"rounds": 1})
    assert start_run(settings, tmp_path / "run", "", Silent()).status == "completed"
    world = build_world(settings)
    test = build_pool(world).labels[len(world.true_labels) :]
    kept = float((test == world.dataset.y_test).double().mean())
    assert 0.05 < kept < 0.5  # 0.23 of 360; the limits are 8 standard deviations off


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"training": {"label_correction": "forward"}}, "set data.label_epsilon, too"),
        ({"data": {"label_epsilon": 0.0}}, "label_epsilon"),
        ({"data": {"label_epsilon": 1e-300}}, "label_epsilon"),
        ({"data": {"label_epsilon": 50.0}}, "label_epsilon"),
        (
            {
                "data": {"label_epsilon": 1.0},
                "training": {"label_correction": "forward"},
                "adversary": {"attacks": ["dlg"]},
            },
            "attacks on gradients are for the cross entropy",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(sections: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises((ValueError, InputError), match=words):
        experiment(**sections)
