"""From settings to mechanisms: each name, and what is refused."""

import pytest
import torch

from fedpriv.config import NOISE_PARAMETER, MechanismConfig
from fedpriv.mechanisms import (
    GaussianMechanism,
    HeterogeneousGaussianMechanism,
    LaplaceMechanism,
    Mechanism,
    NoMechanism,
    VmfMechanism,
    build_mechanism,
    layer_shares,
)

SHARES = layer_shares({"a": torch.zeros(3, 4), "b": torch.zeros(5)})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "none"}, NoMechanism()),
        ({"name": "none", "sigma": 2.0}, NoMechanism()),
        ({"name": "gaussian", "sigma": 2.0, "clip_norm": 3.0}, GaussianMechanism(2.0, 3.0, "flat")),
        ({"name": "gaussian", "sigma": 2.0, "clipping": "layer"}, GaussianMechanism(2.0, 1.0, "layer")),
        ({"name": "gaussian", "sigma": 2.0, "scale": 5.0, "kappa": 7.0}, GaussianMechanism(2.0, 1.0)),
        ({"name": "laplace", "scale": 2.0, "clip_norm": 3.0}, LaplaceMechanism(2.0, 3.0)),
        ({"name": "laplace", "scale": 2.0, "unit": "update"}, LaplaceMechanism(2.0, 1.0)),
        ({"name": "vmf", "kappa": 9.0}, VmfMechanism(9.0, "whole", 1.0)),
        ({"name": "vmf", "kappa": 0.0}, VmfMechanism(0.0, "whole", 1.0)),
        ({"name": "vmf", "kappa": 4.5, "blocks": "layer"}, VmfMechanism(4.5, "layer", 1.0)),
        ({"name": "vmf", "kappa": 9.0, "clip_norm": 3.0}, VmfMechanism(9.0, "whole", 1.0)),
        ({"name": "vmf", "kappa": 9.0, "clip_norm": 3.0, "unit": "update"}, VmfMechanism(9.0, "whole", 3.0)),
        ({"name": "hgm", "sigma": 2.0, "clip_norm": 3.0}, HeterogeneousGaussianMechanism(2.0, 3.0, SHARES)),
        ({"name": "hgm", "sigma": 2.0, "unit": "update"}, HeterogeneousGaussianMechanism(2.0, 1.0, SHARES)),
    ],
)
def test_build(settings: dict[str, object], expected: Mechanism) -> None:
    built = build_mechanism(MechanismConfig.model_validate(settings), SHARES)
    assert built == expected
    assert built.name == settings["name"]


@pytest.mark.parametrize("name", [name for name, parameter in NOISE_PARAMETER.items() if parameter])
@pytest.mark.parametrize("target", ["epsilon", "target_epsilon"])
def test_a_target_is_not_the_noise(name: str, target: str) -> None:
    config = MechanismConfig.model_validate({"name": name, target: 1.0})
    with pytest.raises(ValueError, match=f"{name} needs {NOISE_PARAMETER[name]} itself"):
        build_mechanism(config, SHARES)


def test_hgm_needs_its_shares() -> None:
    with pytest.raises(ValueError, match="hgm needs r"):
        build_mechanism(MechanismConfig(name="hgm", sigma=1.0))


def test_every_name_of_the_settings_is_built() -> None:
    names = MechanismConfig.model_fields["name"].annotation.__args__  # type: ignore[union-attr]
    assert set(names) == set(NOISE_PARAMETER)
    for name, parameter in NOISE_PARAMETER.items():
        config = MechanismConfig.model_validate({"name": name} | ({parameter: 1.0} if parameter else {}))
        assert build_mechanism(config, SHARES).name == name
