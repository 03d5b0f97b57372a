"""Values and gradients with and without compiling, and when it is done."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from attack_networks import DIGITS, seeded
from attack_victims import observe_digits
from torch import Tensor, nn

from fedpriv.attacks.reconstruction import matching
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.matching import (
    Evaluator,
    Matcher,
    Objective,
    angle,
    squared_distance,
    total_variation,
)
from fedpriv.attacks.reconstruction.upload_model import prepare_victims


def parabola(points: Tensor, weights: Tensor) -> Tensor:
    return (weights * points.square()).sum(dim=1)


def variables() -> tuple[Tensor, Tensor]:
    return torch.arange(6.0).reshape(3, 2), torch.ones(3, 2) / 2


def test_values_and_gradients() -> None:
    points, weights = variables()
    losses, (first, second) = Evaluator(parabola, 3)(points, weights)
    assert losses.tolist() == [0.5, 6.5, 20.5]
    torch.testing.assert_close(first, points)
    torch.testing.assert_close(second, points.square())
    assert not losses.requires_grad


def test_what_the_loss_does_not_depend_on_has_a_gradient_of_zero() -> None:
    points, weights = variables()
    _, (_, gradient) = Evaluator(lambda x, _: x.sum(dim=1), 3)(points, weights)
    assert torch.equal(gradient, torch.zeros_like(weights))


def slowed(monkeypatch: pytest.MonkeyPatch, eager: float, compiled: float) -> list[int]:
    """Pretend that evaluations take so many seconds; return the list of compilations."""
    made: list[int] = []

    def compile_it(run: Callable[..., tuple[Tensor, ...]], _: object) -> Callable[..., tuple[Tensor, ...]]:
        made.append(1)
        return lambda *values: run(*values)

    monkeypatch.setattr(matching, "_compiled", compile_it)
    monkeypatch.setattr(matching, "_timed", lambda run, given: (compiled if made else eager, run(*given)))
    return made


@pytest.mark.parametrize(
    ("evaluations", "eager", "compiled", "compilations", "used"),
    [
        (10, 1.0, 0.5, 0, False),  # short: not even tried
        (1000, 1.0, 0.5, 1, True),
        (1000, 1.0, 1.5, 1, False),  # tried, and found to be slower
    ],
)
def test_only_long_jobs_are_compiled_and_only_where_it_pays(
    monkeypatch: pytest.MonkeyPatch, evaluations: int, eager: float, compiled: float, compilations: int, used: bool
) -> None:
    made = slowed(monkeypatch, eager, compiled)
    evaluate = Evaluator(parabola, evaluations)
    for _ in range(5):
        losses, _ = evaluate(*variables())
        assert losses.tolist() == [0.5, 6.5, 20.5]
    assert len(made) == compilations
    assert evaluate.compiled == used
    assert evaluate.note == ""


def test_never_and_always(monkeypatch: pytest.MonkeyPatch) -> None:
    made = slowed(monkeypatch, 1.0, 2.0)
    Evaluator(parabola, 10**6, "never")(*variables())
    assert not made
    always = Evaluator(parabola, 1, "always")
    always(*variables())
    assert always.compiled


def test_without_a_compiler_it_goes_on_in_eager_mode_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr(matching, "_compiled", none)
    evaluate = Evaluator(parabola, 1, "always")
    losses, _ = evaluate(*variables())
    assert losses.tolist() == [0.5, 6.5, 20.5]
    assert evaluate.note == "not compiled: No working C++ compiler found"
    assert not evaluate.compiled


def convolution() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(144, 10))).float()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "distance"), [(convolution, squared_distance), (DIGITS["own"], angle)], ids=["convolution", "own"]
)
def test_compiled_code_gives_the_same_numbers(
    make: Callable[[], nn.Module], distance: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both routes, two mechanisms in one batch, two restarts, at other points than those it was compiled at.

    The C++ compiler takes a minute for three layers: here is the graph alone, below what it makes of a smaller one.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = make()
    clean, _, _ = observe_digits(model, 3)
    noised, _, _ = observe_digits(model, 2, mechanism={"name": "gaussian", "sigma": 1e-3, "clip_norm": 0.5})
    network = Network(model)
    victims = prepare_victims([*clean, *noised], network.names, network.device)
    rows = [victim for victim in victims for _ in range(2)]
    matcher = Matcher(network, rows, distance)

    def losses(images: Tensor, logits: Tensor) -> Tensor:
        return matcher(images, logits.softmax(dim=2)) + 1e-3 * total_variation(images)

    compiled, eager = Evaluator(losses, 1, "always"), Evaluator(losses, 1, "never")
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        images = torch.randn(len(rows), 1, 1, 8, 8, generator=generator)
        logits = torch.randn(len(rows), 1, 10, generator=generator)
        (one, first), (other, second) = compiled(images, logits), eager(images, logits)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for left, right in zip(first, second, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5 * float(right.abs().max()))
    assert compiled.compiled, compiled.note


@pytest.mark.slow
def test_the_compiler_gives_the_same_numbers() -> None:
    compiled, eager = Evaluator(parabola, 1, "always"), Evaluator(parabola, 1, "never")
    (one, first), (other, second) = compiled(*variables()), eager(*variables())
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(first, second)
    assert compiled.compiled, compiled.note


def test_no_memory_for_compiling_is_not_taken_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("fedpriv.attacks.reconstruction.matching._compiled", full)
    evaluate = Evaluator(lambda values: values.square().flatten(1).sum(dim=1), 10, "always")
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(torch.ones(2, 3))
