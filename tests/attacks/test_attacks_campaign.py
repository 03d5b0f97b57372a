"""Many victims: what is broken is named and left out, the rest gives what it gives alone, and bugs are not hidden."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from attack_victims import lenet, mlp, observe_digits
from torch import nn

from fedpriv.attacks import campaign
from fedpriv.attacks.campaign import attack_each, fault
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, Reconstruction, run_attack
from fedpriv.attacks.reconstruction.dummy_gradients import network
from fedpriv.attacks.reconstruction.results import Outcome
from fedpriv.core.errors import RunFailedError
from fedpriv.core.registry import ATTACKS
from tests.cases import in_one_test

CONFIG = IgaSettings(iterations=5, restarts=2)


def spoilt(observation: Observation, **upload: torch.Tensor) -> Observation:
    """An observation whose upload and parameters both have (or lack) some tensors."""
    tensors = {key: value for key, value in {**observation.upload, **upload}.items() if value.numel()}
    parameters = {key: observation.parameters.get(key, value) for key, value in tensors.items()}
    parameters = {
        key: value if value.shape == tensors[key].shape else tensors[key] for key, value in parameters.items()
    }
    return replace(observation, upload=tensors, parameters=parameters)


FAULTS = {
    "a layer that the network does not have": (
        lambda one: spoilt(one, extra=torch.ones(2)), "it has a tensor extra, and the network no such parameter"
    ),
    "a layer less": (
        lambda one: spoilt(one, **{"output.bias": torch.zeros(0)}), "it lacks the network's parameter output.bias"
    ),
    "a wrong shape": (
        lambda one: spoilt(one, **{"output.bias": torch.zeros(11)}),
        "output.bias has the shape (11,), in the network (10,)",
    ),
    "NaN": (
        lambda one: replace(one, upload={**one.upload, "output.bias": torch.full((10,), torch.nan)}),
        "NaN or infinity among its upload, in output.bias",
    ),
    "infinite parameters": (
        lambda one: replace(one, parameters={**one.parameters, "output.bias": torch.full((10,), torch.inf)}),
        "NaN or infinity among its parameters, in output.bias",
    ),
    "local training with batches of unknown size": (
        lambda one: replace(one, settings=replace(one.settings, algorithm="fedavg", batch_size=None)),
        "the batch size is withheld",
    ),
    "labels of another number of examples": (
        lambda one: replace(one, labels=(1, 2)), "2 labels are known, and the public settings make for 1 examples"
    ),
    "a withheld batch size": (
        lambda one: replace(one, settings=replace(one.settings, batch_size=None)), "the batch size is withheld"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@in_one_test("place", [0, 2])
def test_a_broken_upload_is_named_and_the_others_are_attacked(name: str, place: int) -> None:
    model = mlp().double()
    heard, _, _ = observe_digits(model, 3)
    expected = {number: run_attack(AttackJob("iga", [one], model, CONFIG, 0))[0] for number, one in enumerate(heard)}
    spoil, words = FAULTS[name]
    heard[place] = spoil(heard[place])
    result = attack_each(AttackJob("iga", heard, model, CONFIG, 0))
    assert set(result.failures) == {place}
    assert words in result.failures[place]
    assert "\n" not in result.failures[place]
    assert set(result.found) == {0, 1, 2} - {place}
    for number, one in result.found.items():
        torch.testing.assert_close(one.images, expected[number].images, atol=1e-5, rtol=0)


def test_sound_uploads_are_attacked_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(job: AttackJob) -> list[Reconstruction]:
        sizes.append(len(job.observations))
        return run_attack(job)

    monkeypatch.setattr(campaign, "run_attack", counted)
    model = mlp()
    heard, _, _ = observe_digits(model, 4)
    heard[1] = FAULTS["NaN"][0](heard[1])
    assert sorted(attack_each(AttackJob("iga", heard, model, CONFIG, 0)).found) == [0, 2, 3]
    assert sizes == [3]


def test_images_that_are_not_finite_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverging(job: AttackJob) -> list[Reconstruction]:
        found = run_attack(job)
        broken = [replace(one, images=one.images * torch.nan) for one in found[1].attempts]
        return [found[0], replace(found[1], attempts=tuple(broken)), *found[2:]]

    monkeypatch.setattr(campaign, "run_attack", diverging)
    heard, _, _ = observe_digits(mlp(), 3)
    result = attack_each(AttackJob("iga", heard, mlp(), CONFIG, 0))
    assert sorted(result.found) == [0, 2]
    assert result.failures == {1: "the attack diverged: its images are not finite"}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried\nmore"),
    ],
)
def test_no_memory_for_one_victim_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch does not fit, and of the victims the second does not even fit alone."""

    def short_of_memory(job: AttackJob) -> list[Reconstruction]:
        if any(one.client == 1 for one in job.observations):
            raise error
        return run_attack(job)

    monkeypatch.setattr(campaign, "run_attack", short_of_memory)
    model = mlp()
    heard, _, _ = observe_digits(model, 3)
    result = attack_each(AttackJob("iga", heard, model, CONFIG, 0))
    assert set(result.found) == {0, 2}
    assert result.failures[1].startswith("memory does not suffice (")
    assert "\n" not in result.failures[1]


@pytest.mark.parametrize(
    ("text", "expected"), [("can't allocate memory: you tried", RuntimeError), ("shapes do not match", AttackRefused)]
)
def test_a_network_that_cannot_be_differentiated_is_not_one_without_memory(
    text: str, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lacks memory goes up as it is, to where the advice about memory is given."""

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError(text)

    monkeypatch.setattr(network, "vmap", failing)
    monkeypatch.setattr(network, "plain_gradients", failing)
    model = lenet()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    images, labels = torch.zeros(1, 1, 1, 8, 8), torch.full((1, 1, 10), 0.1)
    with pytest.raises(expected, match=text):
        network.Network(model).gradients(parameters, images, labels, shared=True, each=False)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), KeyError("x"), ZeroDivisionError()])
def test_other_exceptions_are_refusals_of_the_uploads_that_they_stop(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named with their type, and with the whole traceback beside them: none is swallowed."""

    def broken(job: AttackJob) -> list[Reconstruction]:
        if any(one.client == 1 for one in job.observations):
            raise error
        return run_attack(job)

    monkeypatch.setattr(campaign, "run_attack", broken)
    model = mlp()
    result = attack_each(AttackJob("iga", observe_digits(model, 3)[0], model, CONFIG, 0))
    assert set(result.found) == {0, 2}
    assert result.failures[1].startswith(f"iga failed unexpectedly: {type(error).__name__}")
    assert [bool(outcome.traceback) for outcome in result.outcomes] == [number == 1 for number in range(3)]
    assert "in broken" in result.outcomes[1].traceback


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RunFailedError("x"), KeyboardInterrupt()])
def test_what_is_no_attacks_error_goes_up(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> list[Reconstruction]:
        raise error

    monkeypatch.setattr(campaign, "run_attack", broken)
    model = mlp()
    with pytest.raises(type(error)):
        attack_each(AttackJob("iga", observe_digits(model, 2)[0], model, CONFIG, 0))


def _good(images: torch.Tensor) -> dict[str, Any]:
    rows = len(images)
    return {
        "images": torch.zeros_like(images),
        "labels": torch.zeros(images.shape[:2], dtype=torch.int64),
        "losses": torch.ones(rows),
        "iterations": torch.ones(rows, dtype=torch.int64),
        "notes": ("",) * rows,
    }


ODD: dict[str, tuple[str, Callable[[torch.Tensor], Any], str]] = {
    "images": ("images", lambda images: images[..., :3], "images of shape"),
    "labels": ("labels", lambda images: torch.zeros(len(images), 7, dtype=torch.int64), "labels of shape"),
    "broken labels": ("labels", lambda images: torch.full(images.shape[:2], 0.5), "labels as torch.float32"),
    "labels too large": ("labels", lambda images: torch.full(images.shape[:2], 10), "labels from 10 to 10; allowed"),
    "labels too small": ("labels", lambda images: torch.full(images.shape[:2], -2), "labels from -2 to -2; allowed"),
    "losses": ("losses", lambda images: torch.ones(len(images) + 1), "losses of"),
    "broken steps": ("iterations", lambda images: torch.ones(len(images)), "iterations as torch.float32"),
    "notes": ("notes", lambda images: (), "notes of 0 rows, expected"),
    "no tensor": ("images", lambda images: None, "theirs (strange) failed: TypeError: object of"),
    "a note of numbers": ("notes", lambda images: 3, "theirs (strange) failed: TypeError"),
    "raises": ("images", lambda images: {}["a"], "theirs (strange) failed: KeyError: 'a'"),
}


def _theirs(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> AttackJob:
    """An attack of another package on three uploads."""
    settings = type(
        "Theirs",
        (IgaSettings,),
        {
            "__module__": "strange",
            "__annotations__": {"name": ClassVar[str]},
            "name": "theirs",
            "runs": classmethod(lambda _: (run,)),
        },
    )
    monkeypatch.setitem(ATTACKS._every(), "theirs", settings)
    return AttackJob("theirs", observe_digits(mlp(), 3)[0], mlp(), settings(iterations=1), 0)


@pytest.mark.parametrize("odd", ODD)
def test_an_attack_of_others_that_misbehaves_fails_with_the_reason(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the upload of client 1; the others are attacked."""
    what, change, words = ODD[odd]

    def run(scene: Any, rows: Any, images: torch.Tensor, *_: Any) -> Outcome:
        fields = _good(images)
        return Outcome(**(fields | {what: change(images)} if any(row.client == 1 for row in rows) else fields))

    result = attack_each(_theirs(monkeypatch, run))
    assert set(result.found) == {0, 2}
    assert words in result.failures[1] and "\n" not in result.failures[1]


def test_notes_of_others_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone surrogate, which no file holds, and a line break."""

    def run(scene: Any, rows: Any, images: torch.Tensor, *_: Any) -> Outcome:
        return Outcome(**_good(images) | {"notes": ("a\ud800b\nc",) * len(images)})

    found = attack_each(_theirs(monkeypatch, run)).found
    assert [one.note for one in found.values()] == ["a b c"] * 3


def test_a_network_that_cannot_be_differentiated_fails_every_victim_with_the_reason() -> None:
    class Rounding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x.flatten(1)).detach().numpy()
            return torch.as_tensor(out)

    model = Rounding()
    heard, _, _ = observe_digits(mlp(), 2)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    heard = [replace(one, parameters=parameters, upload=parameters) for one in heard]
    result = attack_each(AttackJob("iga", heard, model, CONFIG, 0))
    assert result.found == {}
    assert set(result.failures) == {0, 1}
    assert all(reason and "\n" not in reason for reason in result.failures.values())


def test_a_function_without_second_derivative_is_named() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x.flatten(1)).tanh()
            return self.last(nn.functional.embedding_bag(torch.arange(len(x))[:, None], hidden))

    model = Bags()
    heard, _, _ = observe_digits(model, 1)
    (reason,) = attack_each(AttackJob("iga", heard, model, CONFIG, 0)).failures.values()
    assert reason.startswith("torch cannot differentiate this network twice, as iga has to (")
    assert "_embedding_bag_backward" in reason


def test_nothing_to_attack() -> None:
    assert attack_each(AttackJob("iga", [], mlp(), CONFIG, 0)).found == {}


def test_a_sound_upload_has_no_fault() -> None:
    model = lenet()
    assert fault(observe_digits(model, 1)[0][0], model) is None
    frozen = mlp()
    frozen.requires_grad_(False)
    frozen.output.requires_grad_(True)
    heard = observe_digits(mlp(), 1)[0][0]
    sent = {name: value for name, value in heard.upload.items() if name.startswith("output")}
    trained = replace(heard, upload=sent, parameters={name: heard.parameters[name] for name in sent})
    assert fault(trained, frozen) is None
    assert "no such parameter" in str(fault(heard, frozen))


def test_an_attack_that_is_not_known() -> None:
    model = mlp()
    result = attack_each(AttackJob("gan", observe_digits(model, 2)[0], model, CONFIG, 0))
    assert set(result.failures) == {0, 1}
    with pytest.raises(AttackRefused):
        run_attack(AttackJob("gan", observe_digits(model, 1)[0], model, CONFIG, 0))
