"""The public call: independence of victims, choice of restarts, chunks, failures, and what noise does."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attack_victims import digits, errors, lenet, mlp, normalise, observe, observe_digits, parameters_of, settings

from fedpriv.attacks.baselines import guesses
from fedpriv.attacks.methods.dlg import DlgSettings
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.methods.map import MapSettings
from fedpriv.attacks.observation import Observation, read_observation, write_observation
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, Restart, matching, run_attack
from fedpriv.attacks.reconstruction import engine as room
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.recipes import run_recipe
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import prepare_victims
from fedpriv.attacks.settings import ActiveSettings, Recipe
from fedpriv.core.config import AdversaryConfig
from fedpriv.core.registry import ATTACKS
from tests.cases import in_one_test

SHORT = {"dlg": DlgSettings(iterations=5, restarts=3), "iga": IgaSettings(iterations=6, restarts=3)}
LONG = {"dlg": DlgSettings(iterations=100, restarts=2), "iga": IgaSettings(iterations=80, tv=1e-5)}
BOTH = pytest.mark.parametrize("name", ["dlg", "iga"])


def doubled(count: int) -> tuple[torch.nn.Module, list[Observation]]:
    model = mlp().double()
    return model, observe_digits(model, count)[0]


@BOTH
def test_a_victims_result_does_not_depend_on_the_others(name: str) -> None:
    model = lenet().double()
    heard, _, _ = observe_digits(model, 2)
    other_round, _, _ = observe_digits(lenet(seed=3).double(), 1, round_number=2)
    noisy, _, _ = observe_digits(model, 1, mechanism={"name": "vmf", "kappa": 100.0, "blocks": "layer"})
    images, labels = digits()
    batch = observe(model, images[:2], labels[:2], client=9)
    together = run_attack(AttackJob(name, [*heard, *other_round, *noisy, batch], model, SHORT[name], seed=3))
    assert [(one.round, one.client) for one in together] == [(1, 0), (1, 1), (2, 0), (1, 0), (1, 9)]
    for position, observation in enumerate([*heard, *other_round, *noisy, batch]):
        (alone,) = run_attack(AttackJob(name, [observation], model, SHORT[name], seed=3))
        assert alone.chosen == together[position].chosen
        for one, other in zip(alone.attempts, together[position].attempts, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-6)
            torch.testing.assert_close(one.images, other.images, atol=1e-5, rtol=0)


@BOTH
def test_chunks_do_not_change_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, heard = doubled(3)
    whole = run_attack(AttackJob(name, heard, model, SHORT[name], seed=0))
    network = Network(model)
    victims = prepare_victims(heard, network.names, network.device)
    monkeypatch.setattr(matching, "CPU_BYTES", 2 * matching.row_bytes(network, victims[0], (1, 8, 8), 10))
    assert [len(part) for part in matching.chunks(network, victims * 3, (1, 8, 8), 10)] == [2, 2, 2, 2, 1]
    for one, other in zip(whole, run_attack(AttackJob(name, heard, model, SHORT[name], seed=0)), strict=True):
        for left, right in zip(one.attempts, other.attempts, strict=True):
            assert left.loss == pytest.approx(right.loss, rel=1e-6)
            torch.testing.assert_close(left.images, right.images, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows_at_once", [None, 2])
def test_restarts_take_turns_with_coordinates(rows_at_once: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """DLG's restarts 0 and 2 run in decorrelated coordinates, 1 in pixels, however rows are cut into chunks."""
    model, heard = doubled(2)
    network = Network(model)
    victims = prepare_victims(heard, network.names, network.device)
    scene = Scene.of(network, heard[0].settings, torch.float64)
    if rows_at_once:
        size = matching.row_bytes(network, victims[0], scene.shape, scene.classes)
        monkeypatch.setattr(matching, "CPU_BYTES", rows_at_once * size)
    found = run_attack(AttackJob("dlg", heard, model, SHORT["dlg"], seed=3))
    for victim, result in zip(victims, found, strict=True):
        images, logits = scene.starts(3, "dlg", victim, 3)
        for restart, attempt in enumerate(result.attempts):
            one = slice(restart, restart + 1)
            variables = "pixels" if restart == 1 else "decorrelated"
            recipe = Recipe("squared-distance", "lbfgs", variables=variables, labels=("optimised",))
            alone = run_recipe(recipe, scene, [victim], images[one], logits[one], SHORT["dlg"], lambda *_: True)
            assert attempt.loss == pytest.approx(float(alone.losses), rel=1e-6)
    assert ATTACKS["dlg"].parts()["variables"] == "decorrelated and in turn pixels"


@pytest.mark.parametrize("name", ["iga", "map"])
def test_that_nothing_could_be_compiled_is_in_the_notes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(matching, "_compiled", none)
    monkeypatch.setattr(matching, "LONG", 0.0)
    model, heard = doubled(1)
    config = {"iga": IgaSettings(iterations=6), "map": MapSettings(iterations=20)}[name]
    (found,) = run_attack(AttackJob(name, heard, model, config, 0))
    assert "not compiled: No working C++ compiler found" in found.note


@BOTH
def test_seeds(name: str) -> None:
    model, heard = doubled(1)
    first, again, other = (run_attack(AttackJob(name, heard, model, SHORT[name], seed=seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first.images, again.images)
    assert first.losses == again.losses
    assert first.losses != other.losses
    assert len(set(first.losses)) == 3  # restarts differ


@BOTH
def test_protected_and_unprotected_uploads_start_alike(name: str) -> None:
    """So that the difference between them is the mechanism's and not luck: an upload without noise, told or not."""
    model, heard = doubled(1)
    told = replace(heard[0], settings=settings(mechanism={"name": "gaussian", "sigma": 1.0, "clip_norm": 1e6}))
    one, other = run_attack(AttackJob(name, [heard[0], told], model, SHORT[name], seed=0))
    torch.testing.assert_close(one.images, other.images, atol=1e-5, rtol=0)


@in_one_test("losses", [(3.0, 1.0, 2.0), (None, 2.0, 5.0), (1.0, None, None), (None, None, None)])
def test_restarts_are_chosen_by_their_own_loss(losses: tuple[float | None, ...]) -> None:
    """Peers pick by similarity to the original; the call never sees it, and the best picture may well not be chosen."""
    model, heard = doubled(1)
    network = Network(model)
    (victim,) = prepare_victims(heard, network.names, network.device)
    attempts = tuple(
        Restart(torch.full((1, 1, 8, 8), 0.5), torch.tensor([k]), loss, 1) for k, loss in enumerate(losses)
    )
    result = room._result("iga", victim, attempts, "", 0.0)
    finite = [math.inf if loss is None else loss for loss in losses]
    assert result.chosen == int(np.argmin(finite))
    assert result.losses == losses
    assert int(result.labels) == result.chosen
    assert (result.note == room.NOT_FINITE) == (losses == (None, None, None))


@BOTH
def test_a_victim_that_fails_does_not_stop_the_others(name: str) -> None:
    model = mlp()
    heard, truth, _ = observe_digits(model, 3)
    broken = {key: torch.full_like(value, torch.nan) for key, value in heard[1].upload.items()}
    heard[1] = replace(heard[1], upload=broken)
    found = run_attack(AttackJob(name, heard, model, LONG[name], 0))
    assert found[1].loss is None
    assert room.NOT_FINITE in found[1].note
    assert bool(torch.isfinite(found[1].images).all())
    assert float(errors([found[0].images, found[2].images], truth[[0, 2]]).max()) < 0.01
    assert found[0].note == found[2].note == ""


@BOTH
def test_zero_upload_ends_well_and_is_noted(name: str) -> None:
    model = mlp()
    heard, _, _ = observe_digits(model, 1)
    zero = {key: torch.zeros_like(value) for key, value in heard[0].upload.items()}
    (found,) = run_attack(AttackJob(name, [replace(heard[0], upload=zero)], model, SHORT[name], 0))
    assert "zero" in found.note
    assert bool(torch.isfinite(found.images).all())


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        ("dlg", {"name": "vmf", "kappa": 5.0}),
        pytest.param("dlg", {"name": "vmf", "kappa": 5.0, "blocks": "layer"}, marks=pytest.mark.slow),
        pytest.param("iga", {"name": "vmf", "kappa": 0.0}, marks=pytest.mark.slow),
        ("iga", {"name": "gaussian", "sigma": 5.0, "clip_norm": 1.0}),
    ],
)
def test_strong_noise_protects(name: str, mechanism: dict[str, object]) -> None:
    """The same attack on the same digits succeeds without noise and does worse than the guess with it."""
    model = mlp()
    clean, truth, _ = observe_digits(model, 4)
    noisy, _, _ = observe_digits(model, 4, mechanism=mechanism)
    config = {"dlg": DlgSettings(iterations=60, restarts=1), "iga": IgaSettings(iterations=80, tv=1e-5)}[name]
    found = run_attack(AttackJob(name, [*clean, *noisy], model, config, 0))
    images = [result.images for result in found]
    guess = guesses(digits()[0][1000:])[0].image.expand_as(truth[0])
    assert float(errors(images[:4], truth).median()) < 0.01
    assert float(errors(images[4:], truth).median()) > float(errors([guess] * 4, truth).median())


@BOTH
def test_update_of_one_local_step(name: str) -> None:
    images, labels = digits()
    heard, model = [], mlp()
    for client in range(3):
        local = mlp()
        before = parameters_of(local)
        optimiser = torch.optim.SGD(local.parameters(), lr=0.2)
        F.cross_entropy(local(normalise(images[[client]])), labels[[client]]).backward()
        optimiser.step()
        upload = {key: value.detach() - before[key] for key, value in local.named_parameters()}
        heard.append(Observation(1, client, before, upload, settings(algorithm="fedavg", learning_rate=0.2)))
    found = run_attack(AttackJob(name, heard, model, LONG[name], 0))
    assert [int(result.labels) for result in found] == labels[:3].tolist()
    assert float(errors([result.images for result in found], images[:3, None]).max()) < 0.01
    assert all(result.note == "" for result in found)


@BOTH
def test_works_from_the_files_alone(name: str, tmp_path: Path) -> None:
    """What the adversary reads from disk gives the same result: nothing else reaches it."""
    model = mlp()
    heard, _, _ = observe_digits(model, 2)
    read = [read_observation(write_observation(tmp_path, observation)) for observation in heard]
    blank = mlp(seed=99)  # the caller's own parameters do not matter
    for one, other in zip(
        run_attack(AttackJob(name, heard, model, SHORT[name], 0)),
        run_attack(AttackJob(name, read, blank, SHORT[name], 0)),
        strict=True,
    ):
        assert torch.equal(one.images, other.images)
        assert one.losses == other.losses


@BOTH
def test_progress(name: str) -> None:
    model, heard = doubled(2)
    seen: list[tuple[int, int, float]] = []
    run_attack(AttackJob(name, heard, model, SHORT[name], 0, lambda *told: seen.append(told)))
    done = [one[0] for one in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][1] == SHORT[name].iterations
    assert all(math.isfinite(loss) for *_, loss in seen)


def test_results() -> None:
    model, heard = doubled(2)
    for name, config in SHORT.items():
        for result in run_attack(AttackJob(name, heard, model, config, 0)):
            assert result.attack == name
            assert result.images.shape == (1, 1, 8, 8)
            assert result.images.dtype == torch.float32
            assert result.labels.shape == (1,)
            assert len(result.attempts) == config.restarts
            assert all(0 < attempt.iterations <= config.iterations for attempt in result.attempts)
            assert result.seconds > 0
    assert run_attack(AttackJob("iga", [], model, IgaSettings(), 0)) == []


def test_leaves_the_global_generator_and_the_network_alone() -> None:
    model, heard = doubled(1)
    before, weights = torch.get_rng_state(), parameters_of(model)
    run_attack(AttackJob("iga", heard, model, SHORT["iga"], 0))
    run_attack(AttackJob("dlg", heard, model, SHORT["dlg"], 0))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, weights[key]) for key, value in model.named_parameters())


def test_wrong_calls() -> None:
    model, heard = doubled(2)
    with pytest.raises(AttackRefused, match=f"known: {', '.join(ATTACKS)}"):
        run_attack(AttackJob("gan", heard, model, IgaSettings(), 0))
    with pytest.raises(AttackRefused, match="IgaSettings"):
        run_attack(AttackJob("iga", heard, model, DlgSettings(), 0))
    alien = replace(heard[1], settings=replace(heard[1].settings, mean=(0.9,)))
    with pytest.raises(AttackRefused, match="different data sets"):
        run_attack(AttackJob("iga", [heard[0], alien], model, IgaSettings(), 0))


def test_the_table_of_attacks_is_that_of_the_settings() -> None:
    names = tuple(ATTACKS)
    active = [name for name, attack in ATTACKS.items() if issubclass(attack, ActiveSettings)]
    for one in active:  # a server sends one kind of parameters
        asked = tuple(name for name in names if name == one or name not in active)
        assert AdversaryConfig(attacks=asked, threat_model="malicious-server").attacks == asked
    with pytest.raises(ValueError, match="fishing and imprint each send parameters of their own"):
        AdversaryConfig(attacks=names, threat_model="malicious-server")
    assert set(AdversaryConfig().attacks) < set(names)
    for name, attack in ATTACKS.items():
        assert attack.name == name
        assert type(AdversaryConfig().settings(name)) is attack
        assert "20" in attack.reference


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@BOTH
def test_on_a_gpu(name: str) -> None:
    """The same starts and nearly the same numbers as on the CPU, in float64."""
    model, heard = doubled(2)
    there = run_attack(AttackJob(name, heard, mlp().double().cuda(), SHORT[name], 0))
    for one, other in zip(run_attack(AttackJob(name, heard, model, SHORT[name], 0)), there, strict=True):
        assert other.images.device.type == "cpu"
        for left, right in zip(one.attempts, other.attempts, strict=True):
            assert left.loss == pytest.approx(right.loss, rel=1e-4)
