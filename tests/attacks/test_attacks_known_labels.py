"""Labels that the threat model grants are used; labels that it withholds have no way into an attack."""

from dataclasses import replace

import pytest
import torch
from attack_victims import digits, errors, mlp, observe, observe_digits

from fedpriv.attacks.methods.dlg import DlgSettings
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.reconstruction import AttackJob, run_attack

CONFIGS = {"dlg": DlgSettings(iterations=60, restarts=2), "iga": IgaSettings(iterations=80, tv=1e-5)}
BOTH = pytest.mark.parametrize("name", list(CONFIGS))


@BOTH
def test_granted_labels_are_taken_as_they_are(name: str) -> None:
    """Wrong ones, too: so it is these that are used, and not those that could be read off the upload."""
    model = mlp()
    heard, truth, labels = observe_digits(model, 3)
    right = [replace(one, labels=(int(label),)) for one, label in zip(heard, labels, strict=True)]
    wrong = [replace(one, labels=((int(label) + 1) % 10,)) for one, label in zip(heard, labels, strict=True)]
    found = run_attack(AttackJob(name, [*right, *wrong, *heard], model, CONFIGS[name], 0))
    assert [result.labels.tolist() for result in found[:3]] == labels.tolist()
    assert [int(result.labels) for result in found[3:6]] == [(int(label) + 1) % 10 for label in labels]
    assert [result.labels.tolist() for result in found[6:]] == labels.tolist()
    images = [result.images for result in found]
    assert float(errors(images[:3], truth).max()) < 0.01
    assert float(errors(images[3:6], truth).min()) > 0.01


@BOTH
def test_a_victims_labels_are_its_own(name: str) -> None:
    """One with labels, one without, in one batch and alone."""
    model = mlp().double()
    (first, second), _, labels = observe_digits(model, 2)
    first = replace(first, labels=(int(labels[0]),))
    config = CONFIGS[name].model_copy(update={"iterations": 10})
    together = run_attack(AttackJob(name, [first, second], model, config, 0))
    for one, observation in zip(together, (first, second), strict=True):
        (alone,) = run_attack(AttackJob(name, [observation], model, config, 0))
        torch.testing.assert_close(one.images, alone.images, atol=1e-5, rtol=0)
        assert one.labels.tolist() == alone.labels.tolist()


@BOTH
def test_granted_labels_of_a_batch(name: str) -> None:
    model = mlp()
    images, labels = digits()
    rows = [3, 13, 4]  # labels with a duplicate
    heard = observe(model, images[rows], labels[rows])
    given = tuple(sorted(labels[rows].tolist()))
    (found,) = run_attack(AttackJob(name, [replace(heard, labels=given)], model, CONFIGS[name], 0))
    assert sorted(found.labels.tolist()) == list(given)


def test_granted_labels_survive_noise_that_hides_them() -> None:
    model = mlp()
    heard, _, labels = observe_digits(model, 4, mechanism={"name": "vmf", "kappa": 0.0})
    told = [replace(one, labels=(int(label),)) for one, label in zip(heard, labels, strict=True)]
    config = IgaSettings(iterations=5)
    assert [
        int(one.labels) for one in run_attack(AttackJob("iga", told, model, config, 0))
    ] == labels.flatten().tolist()
    assert [
        int(one.labels) for one in run_attack(AttackJob("iga", heard, model, config, 0))
    ] != labels.flatten().tolist()
