"""Threat models say both what is known and what is withheld, and refuse what they withhold."""

from itertools import product
from typing import get_args

import pytest

from fedpriv.attacks.settings import Access
from fedpriv.attacks.threat import LISTENERS, prober, probers, threat_model
from fedpriv.core.config import AdversaryConfig, Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.registry import ATTACKS
from tests.cases import in_one_test

NAMES = tuple(LISTENERS)
KNOBS = {
    "knows_mechanism": Access.MECHANISM,
    "knows_batch_size": Access.BATCH_SIZE,
    "knows_labels": Access.LABELS,
    "knows_public_data": Access.PUBLIC_DATA,
    "knows_candidates": Access.CANDIDATES,
}
NONE = {"name": "none"}
LISTENING = (Access.PARAMETERS, Access.UPLOADS, Access.SUM, Access.ACTIVE)


def test_the_table_is_that_of_the_settings() -> None:
    assert get_args(AdversaryConfig.model_fields["threat_model"].annotation) == NAMES
    assert set(KNOBS) == {key for key in AdversaryConfig.model_fields if key.startswith("knows_")}
    finished = {access for model in probers(Experiment()).values() for access in model.grants}
    assert set(KNOBS.values()) | set(LISTENING) | finished == set(Access)


def test_a_user_has_answers_and_others_the_model_too() -> None:
    blind = {"adversary": {"attacks": [], "knows_public_data": False}}
    run = Experiment.model_validate(blind)
    pate = Experiment.model_validate({**blind, "federation": {"algorithm": "pate", "rounds": 1}, "mechanism": NONE})
    user, participant = (prober(name, run) for name in ("user", "participant"))
    assert "mi-face needs the finished model, which the threat model user withholds" in str(
        user.refusal("mi-face", (Access.MODEL,))
    )
    assert user.refusal("extraction", (Access.ANSWERS,)) is None
    assert prober("user", pate).grants == user.grants
    student_holder = prober(None, pate)
    assert (prober(None, run), student_holder.name) == (participant, "student-holder")
    for holder in (participant, student_holder):
        assert holder.refusal("mi-face", (Access.MODEL, Access.ANSWERS)) is None
        assert "knows_public_data = false" in str(holder.refusal("one", (Access.PUBLIC_DATA,)))
        assert not holder.grants_uploads
    assert "votes and their counts" in student_holder.withheld
    with pytest.raises(InputError, match="no adversary 'usr' of this run's model; did you mean user"):
        prober("usr", run)
    with pytest.raises(InputError, match=r"no adversary 'student-holder' .*known: participant, user, curious-endpoint"):
        prober("student-holder", run)
    with pytest.raises(InputError, match=r"no adversary 'participant' .*known: student-holder, user, curious-endpoint"):
        prober("participant", pate)


@in_one_test("name", NAMES)
def test_description_names_every_item(name: str) -> None:
    model = threat_model(AdversaryConfig(threat_model=name))
    text = " ".join(model.describe().split())
    for item in (model.name, model.listener, *model.sees, *model.knows, *model.withheld, model.conduct):
        assert item in text
    assert max(map(len, model.describe().splitlines())) < 80
    assert all(word in " ".join(model.withheld) for word in ("labels", "seed", "random numbers of the mechanism"))
    assert all(
        word in " ".join(model.knows) for word in ("mechanism and its parameters", "batch size", "learning rate")
    )


def test_of_a_table_it_speaks_of_rows() -> None:
    model = threat_model(AdversaryConfig(knows_public_data=False), kind="row")
    assert "the rows" in model.withheld and "public rows of the same kind" in model.withheld
    assert "image" not in model.describe() and "needs public rows" in str(model.refusal("map", (Access.PUBLIC_DATA,)))


@pytest.mark.parametrize(("name", "values"), list(product(NAMES, product((False, True), repeat=len(KNOBS)))))
def test_every_knob_moves_one_item_from_known_to_withheld(name: str, values: tuple[bool, ...]) -> None:
    switches = dict(zip(KNOBS, values, strict=True))
    model = threat_model(AdversaryConfig.model_validate({"threat_model": name, **switches}))
    for key, access in KNOBS.items():
        assert (access.words in model.knows) == (access in model.grants) == switches[key]
        assert (access.words in model.withheld) == (not switches[key])
        refusal = model.refusal("map", (access,))
        assert (refusal is None) == switches[key]
        assert switches[key] or f"adversary.{key} = false" in str(refusal)


def test_who_gets_what() -> None:
    """Single uploads, their sum, active conduct: for each listener, as the texts say."""
    gets = {
        name: tuple(need in threat_model(AdversaryConfig(threat_model=name)).grants for need in LISTENING)
        for name in NAMES
    }
    assert gets == {
        "honest-but-curious-server": (True, True, True, False),
        "malicious-server": (True, True, True, True),
        "secure-aggregation": (True, False, True, False),
        "malicious-secure-aggregation": (True, False, True, True),
        "network-plaintext": (True, True, True, False),
        "outsider": (True, False, True, False),
        "network-tls": (False, False, False, False),
    }
    for name, (_, single, some, active) in gets.items():
        model = threat_model(AdversaryConfig(threat_model=name))
        assert model.conduct.startswith("active" if active else "passive")
        assert ("the upload of a single client" in model.withheld) == (some and not single)


def test_labels_are_withheld_unless_somebody_grants_them() -> None:
    """Peers leak labels into attacks whose threat model withholds them."""
    for name in NAMES:
        assert Access.LABELS not in threat_model(AdversaryConfig(threat_model=name)).grants
    assert not any(Access.LABELS in attack.needs for attack in ATTACKS.values())


def test_a_refusal_names_attack_need_and_threat_model() -> None:
    behind_tls = threat_model(AdversaryConfig(threat_model="network-tls"))
    for attack in ATTACKS.values():
        text = behind_tls.refusal(attack.name, attack.needs)
        assert text is not None
        assert attack.name in text and "network-tls" in text and attack.needs[0].words in text
    summed = threat_model(AdversaryConfig(threat_model="secure-aggregation"))
    assert "uploads of single clients" in str(summed.refusal("averaging", (Access.SUM, Access.UPLOADS)))
    assert summed.refusal("iga", ATTACKS["iga"].needs) is None
