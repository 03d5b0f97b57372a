"""From settings to mechanisms: each name, and what is refused."""

import pytest
import torch

from fedpriv.core.registry import MECHANISMS
from fedpriv.mechanisms import mechanism_settings
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.heterogeneous import HeterogeneousGaussianMechanism
from fedpriv.mechanisms.laplace import LaplaceMechanism
from fedpriv.mechanisms.machinery.base import Mechanism
from fedpriv.mechanisms.machinery.redistribution import layer_shares
from fedpriv.mechanisms.none import NoMechanism
from fedpriv.mechanisms.vmf import VmfMechanism
from tests.cases import in_one_test

SHARES = layer_shares({"a": torch.zeros(3, 4), "b": torch.zeros(5)})


@in_one_test(
    ("settings", "expected"),
    [
        ({"name": "none"}, NoMechanism()),
        ({"name": "gaussian", "sigma": 2.0, "clip_norm": 3.0}, GaussianMechanism(2.0, 3.0, "flat")),
        ({"name": "gaussian", "sigma": 2.0, "clipping": "layer"}, GaussianMechanism(2.0, 1.0, "layer")),
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
    built = mechanism_settings(settings).mechanism(SHARES)
    assert built == expected
    assert built.name == settings["name"]


@in_one_test("name", [name for name, kind in MECHANISMS.items() if kind.parameter])
@in_one_test("target", ["epsilon", "target_epsilon"])
def test_a_target_is_not_the_noise(name: str, target: str) -> None:
    settings = {"name": name, target: 1.0}
    if target == "epsilon" and MECHANISMS[name].model_fields["epsilon"].annotation is type(None):
        with pytest.raises(ValueError, match="epsilon"):
            mechanism_settings(settings)
        return
    config = mechanism_settings(settings)
    with pytest.raises(ValueError, match=f"{name} needs {MECHANISMS[name].parameter} itself"):
        config.mechanism(SHARES)


def test_hgm_needs_its_shares() -> None:
    with pytest.raises(ValueError, match="hgm needs r"):
        mechanism_settings({"name": "hgm", "sigma": 1.0}).mechanism()


def test_every_name_of_the_settings_is_built() -> None:
    for name, kind in MECHANISMS.items():
        if not kind.on_gradients:
            continue
        config = mechanism_settings({"name": name} | ({kind.parameter: 1.0} if kind.parameter else {}))
        # What leaves a client without its own noise is a sum of clipped gradients, as of the normal mechanism.
        assert config.mechanism(SHARES).name == (name if kind.noise_at == "clients" else "gaussian")
