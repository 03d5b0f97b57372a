"""Rows that are nearly copies, and biases that decide alone: active attacks have them, honest networks do not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpriv.attacks.methods.crafted import FishingSettings, ImprintSettings
from fedpriv.attacks.threat import threat_model
from fedpriv.core.config import AdversaryConfig
from fedpriv.flower._privatise import copied_rows, lonely_bias
from fedpriv.models.convnets import ConvnetSettings, LenetSettings, ResnetSettings, StridedSettings
from fedpriv.models.machinery.build import build_model
from fedpriv.models.perceptrons import LogisticSettings, MlpSettings

SHAPE = (1, 8, 8)
NETWORKS = (
    MlpSettings(hidden=(80, 32)),
    LenetSettings(),
    ConvnetSettings(),
    StridedSettings(),
    ResnetSettings(),
    LogisticSettings(),
)


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


def test_honest_training_raises_no_alarm() -> None:
    """Six networks, three seeds, at the start and after steps on a batch in which all classes occur: 36 cases, none
    with an alarm, so below 8 % with 95 % confidence (Clopper and Pearson)."""
    generator = torch.Generator().manual_seed(1)
    alarms, cases = 0, 0
    for settings in NETWORKS:
        for seed in range(3):
            model = build_model(settings, SHAPE, 10, seed)
            images, labels = torch.randn(20, *SHAPE, generator=generator), torch.arange(20) % 10
            alarms += bool(copied_rows(held(model)) or lonely_bias(held(model)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
            alarms += bool(copied_rows(held(model)) or lonely_bias(held(model)))
            cases += 2
    assert (alarms, cases) == (0, 36)


@pytest.mark.parametrize(
    ("attack", "settings", "layer"),
    [
        (ImprintSettings(), NETWORKS[0], "hidden1.weight"),
        (ImprintSettings(), NETWORKS[3], "hidden.weight"),
        (FishingSettings(), NETWORKS[0], "output.weight"),
        (FishingSettings(), NETWORKS[1], "output.weight"),
        (FishingSettings(), NETWORKS[2], "output.weight"),
    ],
)
def test_active_attacks_raise_it(attack: ImprintSettings | FishingSettings, settings: MlpSettings, layer: str) -> None:
    threat = threat_model(AdversaryConfig.model_validate({"threat_model": "malicious-server"}))
    public = torch.rand(50, *SHAPE, generator=torch.Generator().manual_seed(2))
    made = attack.craft(build_model(settings, SHAPE, 10, 1), public, threat)
    stream = torch.Generator().manual_seed(3)
    for share in (0.0, 0.02):  # random numbers, relative to the longest row, that are to hide the copies
        noise = torch.randn(made[layer].shape, generator=stream) * share / made[layer].shape[1] ** 0.5
        noisy = made | {layer: made[layer] + noise * made[layer].norm(dim=1).max()}
        copies, rows = copied_rows(noisy)[layer]
        assert copies >= rows - 2
    drawn = made | {layer: torch.randn(made[layer].shape, generator=stream)}
    assert layer not in copied_rows(drawn)
    assert lonely_bias(drawn) == (("output.bias", 20.0) if isinstance(attack, FishingSettings) else None)


def test_few_copies_short_rows_and_untrained_zeros_are_none() -> None:
    drawn = torch.randn(10, 20, generator=torch.Generator().manual_seed(3))
    drawn[1] = drawn[0]
    assert not copied_rows({"a": drawn, "b": torch.zeros(5, 20), "c": torch.ones(64, 1, 2, 2), "d": torch.ones(30)})
    assert not copied_rows({"a": torch.cat([drawn, drawn])})
    assert copied_rows({"a": torch.cat([drawn] * 4)}) == {"a": (31, 40)}
