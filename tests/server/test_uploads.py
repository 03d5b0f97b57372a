"""The server's door: honest uploads pass, whatever the mechanism; anything else is refused with its reason."""

import math
import re
from itertools import product

import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from scipy.stats import binom, chi

from fedpriv.clients.training import local_upload
from fedpriv.core.records import Failure
from fedpriv.core.wire import pack
from fedpriv.core.world import State, World, build_world
from fedpriv.data.sampling import Sampling
from fedpriv.engines.inline import assume_server_identity
from fedpriv.gradients import DenseGradients
from fedpriv.mechanisms.laplace import LaplaceMechanism
from fedpriv.mechanisms.machinery.clipping import normal_norm
from fedpriv.mechanisms.vmf import VmfMechanism
from fedpriv.server.uploads import Allowed, Upload, allowed_upload, norm, read_upload
from tests.cases import in_one_test
from tests.integration.small import experiment
from tests.noise import stream

MECHANISMS: tuple[dict[str, object], ...] = (
    {"name": "gaussian", "sigma": 1.0},
    {"name": "gaussian", "sigma": 1e-3, "clipping": "layer", "clip_norm": 0.1},
    {"name": "gaussian", "sigma": 1.0, "unit": "update"},
    {"name": "laplace", "scale": 1.0, "clip_norm": 2.0},
    {"name": "vmf", "kappa": 1.0},
    {"name": "vmf", "kappa": 1e6, "blocks": "size:100"},
    {"name": "vmf", "kappa": 10.0, "blocks": "layer", "unit": "update", "clip_norm": 0.3},
    {"name": "hgm", "sigma": 0.5, "redistribution": "layer"},
)
TRAINING: tuple[tuple[str, dict[str, object]], ...] = (
    ("fedsgd", {}),
    ("fedsgd", {"sampling": "poisson"}),
    ("fedavg", {"batch_size": 60}),
    ("fedavg", {"batch_size": 60, "momentum": 0.9, "local_epochs": 2}),
    ("fedavg", {"batch_size": 60, "optimizer": "adam"}),
)


def world_of(mechanism: dict[str, object], algorithm: str, training: dict[str, object]) -> World:
    return build_world(experiment(mechanism=mechanism, federation={"algorithm": algorithm}, training=training))


@in_one_test("mechanism", MECHANISMS)
@pytest.mark.parametrize(("algorithm", "training"), TRAINING, ids=str)
def test_honest_uploads_pass_and_hundredfold_ones_do_not(
    mechanism: dict[str, object], algorithm: str, training: dict[str, object]
) -> None:
    """An honest one fails this once in 10^12; that 100 times its norm is refused says that the bound is of use."""
    world = world_of(mechanism, algorithm, training)
    for client in range(2):
        allowed = allowed_upload(world, client)
        length = norm(local_upload(world, client, world.initial, 1).parameters)
        assert length <= allowed.norm < 100 * length
        assert allowed.examples == len(world.partitions[client])
        assert not allowed.statistics


def test_without_a_mechanism_only_the_setting_bounds() -> None:
    assert allowed_upload(build_world(experiment()), 1).norm == math.inf
    bounded = build_world(experiment(federation={"max_update_norm": 3.0}))
    assert allowed_upload(bounded, 1).norm == 3.0
    both = {"name": "gaussian", "sigma": 1.0}
    tight = build_world(experiment(mechanism=both, federation={"max_update_norm": 1e-3}))
    wide = build_world(experiment(mechanism=both, federation={"max_update_norm": 1e9}))
    assert allowed_upload(tight, 0).norm == 1e-3
    assert allowed_upload(wide, 0).norm < 1e3


@in_one_test(("dimension", "tail"), list(product([1, 10, 1000, 10**6], [0.5, 1e-3, 1e-12])))
def test_the_norm_of_normal_noise_is_scipys(dimension: int, tail: float) -> None:
    bound, exact = normal_norm(dimension, 1.0, tail), float(chi.isf(tail, dimension))
    assert exact <= bound <= 1.5 * exact + 2


@pytest.mark.parametrize(
    ("mechanism", "tail"), [(LaplaceMechanism(0.7, 2.0), 0.05), (VmfMechanism(3.0, "layer", 0.5), 0.5)]
)
def test_releases_exceed_the_bound_no_more_often_than_said(
    mechanism: LaplaceMechanism | VmfMechanism, tail: float
) -> None:
    """400 releases; the count is above its 1 - 10^-9 quantile by chance once in 10^9."""
    generator = stream(5)
    gradients = DenseGradients({"a": torch.ones(3, 20, 4), "b": -torch.ones(3, 5)})
    bound = mechanism.norm_bound(3, 4, (80, 5), tail)
    lengths = [norm(mechanism.release(gradients, 4, generator)) for _ in range(400)]
    assert sum(length > bound * (1 + 1e-6) for length in lengths) <= binom.isf(1e-9, 400, tail)
    assert bound < 10 * max(lengths)


def test_the_largest_poisson_batch() -> None:
    assert Sampling("shuffled", 4, 9).most(1e-12) == 4
    most = Sampling("poisson", 4, 9).most(0.01)
    exact = [sum(math.comb(9, k) * (4 / 9) ** k * (5 / 9) ** (9 - k) for k in range(n + 1, 10)) for n in range(10)]
    assert exact[most] <= 0.01 < exact[most - 1]


LIKE = State({"b": torch.zeros(2), "a": torch.zeros(3, 2)}, {"running": torch.zeros(2)})
GOOD = {"a": torch.ones(3, 2), "b": torch.ones(2)}
STILL = {"running": torch.zeros(2)}


def reply(
    upload: dict[str, torch.Tensor] | None = None,
    buffers: dict[str, torch.Tensor] | None = None,
    records: dict[str, object] | None = None,
    **client: object,
) -> Message:
    assume_server_identity(1)
    metrics = MetricRecord({"partition": 1, "examples": 7, **client})  # type: ignore[dict-item]
    parts = {"upload": pack(upload or GOOD), "buffers": pack(buffers or STILL), "client": metrics, **(records or {})}
    kept = {key: value for key, value in parts.items() if value is not None}
    return Message(RecordDict(kept), 3, "train")  # type: ignore[arg-type]


def read(message: Message, norm: float = 10.0, statistics: bool = True) -> Upload | Failure:
    return read_upload(message, 1, LIKE, Allowed(7, norm, statistics))


def test_what_fits_is_taken_in_the_models_order() -> None:
    taken = read(reply())
    assert isinstance(taken, Upload)
    assert (taken.client, taken.examples, list(taken.state.parameters)) == (1, 7, ["b", "a"])
    assert torch.equal(taken.state.parameters["a"], GOOD["a"])


CUT = pack(GOOD)
CUT["a"].data = CUT["a"].data[:-5]


@in_one_test(
    ("message", "words"),
    [
        (reply({**GOOD, "a": torch.full((3, 2), torch.nan)}), "sent NaN or infinity in a"),
        (reply({**GOOD, "b": torch.tensor([-torch.inf, 0])}), "sent NaN or infinity in b"),
        (reply(buffers={"running": torch.full((2,), torch.nan)}), "sent NaN or infinity in running"),
        (reply({**GOOD, "a": torch.ones(2, 3)}), r"sent a of shape \(2, 3\), expected \(3, 2\)"),
        (reply({**GOOD, "a": GOOD["a"].double()}), "sent a as torch.float64, expected torch.float32"),
        (reply({"a": GOOD["a"]}), "left out b"),
        (reply({**GOOD, "c": torch.ones(1)}), "sent c, which the model does not have"),
        (reply({key: 100 * value for key, value in GOOD.items()}), "sent an upload of norm 283; at most 10 is allowed"),
        (reply({key: 3e38 * value for key, value in GOOD.items()}), r"of norm 8.49e\+38; at most 10 is allowed"),
        (reply(examples=8), "says that it holds 8 examples; it holds 7"),
        (reply(examples=-1), "says that it holds -1 examples; it holds 7"),
        (reply(examples=7.0), "examples is 7.0, expected a whole number"),
        (reply(examples=[7]), r"examples is \[7\], expected a whole number"),
        (reply(partition=0), "sent an upload of client 0"),
        (reply(records={"client": None}), "cannot be read"),
        (reply(records={"upload": None}), "sent no upload"),
        (reply(records={"buffers": None}), "left out running"),
        (reply(records={"upload": CUT}), "cannot be read: an array of float32"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(message: Message, words: str) -> None:
    refused = read(message)
    assert isinstance(refused, Failure)
    assert refused.client == 1
    assert re.search(words, refused.reason), refused.reason


def test_running_statistics_do_not_leave_under_a_mechanism() -> None:
    moved = reply(buffers={"running": torch.tensor([0.0, 0.1])})
    assert isinstance(read(moved), Upload)
    refused = read(moved, statistics=False)
    assert isinstance(refused, Failure)
    assert "running statistics" in refused.reason


def test_what_a_client_says_of_itself_fits_into_one_line_of_a_log() -> None:
    refused = read(reply({**GOOD, "\x1b[31mred\n\n<script>" + 9000 * "x": torch.ones(1)}))
    assert isinstance(refused, Failure)
    assert refused.reason.isprintable()
    assert len(refused.reason) <= 300
