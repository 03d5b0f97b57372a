"""The mod that privatises anybody's app; the mistakes of mods that others wrote are tests here."""

import json
import math
import signal
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common import Code, FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common import recorddict_compat as compat
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from scipy import optimize, stats
from torch import nn

from fedpriv.core.errors import InputError, RefusedError
from fedpriv.engines.inline import InlineGrid, run_server
from fedpriv.flower import privatise
from fedpriv.flower._privatise import Privatiser
from fedpriv.flower.app_settings import FlowerSettings, PrivatiseSettings
from fedpriv.flower.arrays import WrongAppError
from fedpriv.mechanisms import mechanism_settings
from tests.flower.apps import Arrays, Old, arrays, client, context, question, record, settings

SIGMA, CLIP = 0.5, 2.0
LITTLE = f'name = "gaussian"\nsigma = 1e-6\nclip_norm = {CLIP}'
BEFORE = {
    "weight": np.full((40, 50), 3.0, np.float32),
    "bias": np.zeros(50, np.float32),
    "bn.running_var": np.ones(5, np.float32),
    "bn.num_batches_tracked": np.array(7),
}


def mod_of(folder: Path, own: str = "", mechanism: str | None = None) -> Mod:
    named = mechanism or f'name = "gaussian"\nsigma = {SIGMA}\nclip_norm = {CLIP}'
    text = f'[mechanism]\n{named}\n[privatise]\nfolder = "{folder / "privacy"}"\n{own}\n'
    return privatise(settings(folder, text))


def app_of(folder: Path, trained: Callable[[Arrays], Arrays], own: str = "", mechanism: str | None = None) -> ClientApp:
    return client([mod_of(folder, own, mechanism)], trained)


def asked(app, number: int = 1, who: Context | None = None) -> dict[str, np.ndarray]:
    return arrays(app(question(BEFORE, number=number), who or context()))


def released(reply: Arrays) -> np.ndarray:
    return np.concatenate([(reply[name].astype(float) - BEFORE[name]).ravel() for name in ("weight", "bias")])


def longer(given: Arrays) -> Arrays:
    """Ten times the clip norm, all in one array; and what BatchNorm changes besides."""
    step = np.zeros_like(given["weight"])
    step[0, 0] = 10 * CLIP
    return {**given, "weight": given["weight"] + step, "bn.running_var": given["bn.running_var"] * 2}


def line(folder: Path, partition: int = 3) -> dict:
    return json.loads((folder / "privacy" / f"client-{partition}.json").read_text())


def tensors(folder: Path, partition: int = 3, part: str = "") -> list[int]:
    """The sizes of the arrays that get noise, as the ledger's first line has them."""
    path = folder / "privacy" / f"client-{partition}{part}.jsonl"
    return json.loads(path.read_text().splitlines()[0])["tensors"]


def test_the_update_is_clipped_and_the_noise_is_the_ledgers(tmp_path: Path) -> None:
    """Chi-square of all coordinates, two-sided; false alarm 1e-6."""
    noise = released(asked(app_of(tmp_path, longer)))
    noise[0] -= CLIP
    statistic = float((noise**2).sum()) / (SIGMA * CLIP) ** 2
    assert 5e-7 < stats.chi2.cdf(statistic, len(noise)) < 1 - 5e-7
    assert line(tmp_path)["noise"] == SIGMA


@pytest.mark.parametrize("mechanism", ["name = 'vmf'\nkappa = 1e6", "name = 'laplace'\nscale = 1e-6\nclip_norm = 2.0"])
def test_other_mechanisms_act_too(mechanism: str, tmp_path: Path) -> None:
    """With next to no noise a release is the clipped update, or its direction."""
    found = released(asked(app_of(tmp_path, longer, mechanism=mechanism)))
    assert found[0] / np.linalg.norm(found) > 0.99


def test_statistics_and_whole_numbers_leave_as_they_came(tmp_path: Path) -> None:
    reply = asked(app_of(tmp_path, longer))
    assert list(reply) == list(BEFORE)
    for name, value in BEFORE.items():
        assert reply[name].dtype == value.dtype
        assert name.startswith("bn") is bool((reply[name] == value).all())


def test_a_counter_takes_nothing_of_the_clipping_norm(tmp_path: Path) -> None:
    """An update below the norm stays as it is, whatever BatchNorm counts: findings/flwr-batchnorm-counter.sh."""

    def counting(given: Arrays) -> Arrays:
        step = np.zeros_like(given["weight"])
        step[0, 0] = CLIP / 2
        return {**given, "weight": given["weight"] + step, "bn.num_batches_tracked": np.array(107)}

    reply = asked(app_of(tmp_path, counting, mechanism=LITTLE))
    assert released(reply)[0] == pytest.approx(CLIP / 2, abs=1e-4)
    assert reply["bn.num_batches_tracked"] == 7


def test_a_parameter_without_dimensions_is_clipped_and_gets_noise(tmp_path: Path) -> None:
    """Normal noise in place of the number: findings/flwr-scalar-parameter.sh; false alarm 1e-8."""
    app = app_of(tmp_path, lambda given: {"scale": given["scale"] + np.float32(100)})
    scale = arrays(app(question({"scale": np.array(1, np.float32)}), context()))["scale"]
    assert scale.shape == () and scale.dtype == np.float32
    assert 0 < abs(float(scale) - (1 + CLIP)) < 6 * SIGMA * CLIP


class Panic(BaseException):
    """As the panic of an extension in Rust reaches Python."""


def raising(error: BaseException) -> Callable[[Arrays], Arrays]:
    def trained(given: Arrays) -> Arrays:
        raise error

    return trained


RAISED = (ValueError, SystemExit, MemoryError, KeyboardInterrupt, GeneratorExit, StopIteration, CancelledError, Panic)


@pytest.mark.parametrize(
    "trained",
    [
        lambda given: given,
        lambda given: {**given, "weight": given["weight"] * np.float32("nan")},
        lambda given: {**given, "bias": given["bias"] + np.float32("inf")},
        lambda given: {"weight": given["weight"]},
        lambda given: {**given, "bias": np.zeros(3, np.float32)},
        lambda given: {**given, "bias": np.full(50, "seven")},
        *(raising(kind("seven")) for kind in RAISED),
    ],
    ids=["unchanged", "nan", "infinite", "missing", "other shape", "texts", *(kind.__name__ for kind in RAISED)],
)
def test_an_update_of_zero_is_noise_and_nothing_else(trained: Callable[[Arrays], Arrays], tmp_path: Path) -> None:
    """Whatever goes wrong with the data, the server gets the same law; false alarm 1e-6."""
    try:
        reply = app_of(tmp_path, trained)(question(BEFORE), context())
    except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt would end the tests
        pytest.fail(f"the server is told {type(error).__name__}: {error}")
    noise = released(arrays(reply))
    statistic = float((noise**2).sum()) / (SIGMA * CLIP) ** 2
    assert 5e-7 < stats.chi2.cdf(statistic, len(noise)) < 1 - 5e-7
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 1}
    assert list(reply.content) == ["arrays", "metrics"]


def test_arrays_that_a_reply_leaves_out_have_not_moved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As with FedBN, where the server's model has layers that each client keeps."""
    quiet = "name = 'gaussian'\nsigma = 1e-6\nclip_norm = 9.0"
    reply = asked(app_of(tmp_path, lambda given: {"weight": given["weight"] + np.float32(0.125)}, mechanism=quiet))
    np.testing.assert_allclose(reply["weight"], BEFORE["weight"] + 0.125, atol=1e-3)
    np.testing.assert_allclose(reply["bias"], BEFORE["bias"], atol=1e-3)
    assert 'wasted on bias, which the reply does not have: privatise.trained = ["weight"]' in caplog.text
    assert "counts as zero" not in caplog.text


def test_why_an_app_failed_is_in_the_clients_own_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked(app_of(tmp_path, raising(Panic("this digit is a seven"))))
    assert "this digit is a seven" in caplog.text and "its update counts as zero" in caplog.text
    asked(app_of(tmp_path, lambda given: {name: value.astype(np.int8) for name, value in given.items()}))
    assert "is int8: privatise reads numbers before they are quantised" in caplog.text


def test_a_client_is_warned_of_weights_whose_rows_are_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked(app_of(tmp_path, longer))
    assert "39 of 40 rows of weight are nearly copies of others" in caplog.text


def test_ctrl_c_ends_the_process_and_no_answer_leaves(tmp_path: Path) -> None:
    """The answer is charged all the same."""

    def interrupted(given: Arrays) -> Arrays:
        signal.raise_signal(signal.SIGINT)
        return given

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            asked(app_of(tmp_path, interrupted))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len((tmp_path / "privacy" / "client-3.jsonl").read_text().splitlines()) == 2


# ---- other messages, records and keys ------------------------------------------------------------------------------

TYPES = ("evaluate", "query", "query.times", "train.times")


@pytest.mark.parametrize("passed", [(), ("evaluate",), ("query",), ("query.times", "train.times")])
@pytest.mark.parametrize("kind", TYPES)
def test_only_messages_that_are_named_pass_and_the_folder_says_so(
    kind: str, passed: tuple[str, ...], tmp_path: Path
) -> None:
    app = app_of(tmp_path, longer, f"pass = {json.dumps(passed)}")
    category, _, action = kind.partition(".")

    def times(message: Message, _: Context) -> Message:
        return Message(RecordDict({"arrays": record({"T": np.array([13.0, 7.0])})}), reply_to=message)

    if action or category == "query":
        getattr(app, category)(action or "default")(times)
    named = kind in passed or (category != "train" and category in passed)
    if named:
        assert arrays(app(question(BEFORE, kind), context()))
        (noted,) = (tmp_path / "privacy" / "client-3-passed.jsonl").read_text().splitlines()
        assert json.loads(noted) == {"type": kind, "run": 1, "round": 1, "covered": "by nothing"}
        assert not (tmp_path / "privacy" / "client-3.json").exists()
    else:
        error = WrongAppError if category == "train" else RefusedError
        with pytest.raises(error, match="none of the arrays" if category == "train" else rf'pass = \["{kind}"\]'):
            app(question(BEFORE, kind), context())
    assert asked(app) and all((note in " ".join(line(tmp_path)["notes"])) for note in passed)


def test_the_record_that_is_protected_does_not_pass(tmp_path: Path) -> None:
    with pytest.raises(WrongAppError, match="pass names arrays, the very record that is to be protected"):
        asked(app_of(tmp_path, longer, 'pass = ["arrays"]'))
    with pytest.raises(InputError, match="train is what privatise covers"):
        app_of(tmp_path, longer, 'pass = ["train"]')


def test_clients_without_a_partition_have_ledgers_of_their_own(tmp_path: Path) -> None:
    for node in (11, 2**62 + 1, 11):
        own = context()
        own.node_config, own.node_id = {"dataset-path": f"/data/{node}"}, node
        asked(app_of(tmp_path, longer), who=own)
    assert [line(tmp_path, node)["participations"] for node in (11, 2**62 + 1)] == [2, 1]
    own.node_config = {"partition-id": "ward-north"}
    with pytest.raises(WrongAppError, match="partition-id = 'ward-north': a whole number, another one for each node"):
        asked(app_of(tmp_path, longer), who=own)


def test_records_of_a_reply_leave_only_if_they_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys that a strategy reads: the weight, which is 1 for all, a config, and a record of arrays."""

    def answer(message: Message, _: Context) -> Message:
        content = RecordDict({"arrays": record(longer(arrays(message))), "more": record({"T": np.ones(2)})})
        content["m"], content["config"] = MetricRecord({"num_samples": 9, "loss": 0.5}), ConfigRecord({"trained": True})
        return Message(content, reply_to=message)

    def reply(own: str) -> RecordDict:
        app = ClientApp(mods=[mod_of(tmp_path, own)])
        app.train()(answer)
        return app(question(BEFORE), context()).content

    plain = reply("")
    assert [*plain] == ["arrays", "metrics"] and dict(plain["metrics"]) == {"num-examples": 1}
    assert "more, m.num_samples, m.loss, config.trained stay at the client" in caplog.text
    sent = reply('send = ["trained", "loss"]\npass = ["more"]\nweight = "num_samples"')
    assert dict(sent["m"]) == {"num_samples": 1, "loss": 0.5} and dict(sent["config"]) == {"trained": True}
    assert sent["more"]["T"].numpy().tolist() == [1, 1] and "metrics" not in sent
    assert ["not covered" in note for note in line(tmp_path)["notes"]].count(True) == 2


class Exclusive(FedAvg):
    """Averages the replies whose config says that they trained."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        kept = [each for each in replies if next(iter(each.content.config_records.values()))["trained"]]
        return super().aggregate_train(server_round, kept)


def federate(client_app: ClientApp, strategy: FedAvg, start: ArrayRecord, rounds: int = 1) -> Arrays:
    """Run a strategy on two clients, and return what it ends with."""
    server, ended = ServerApp(), {}

    @server.main()
    def main(grid: Grid, _: Context) -> None:
        result = strategy.start(grid, start, num_rounds=rounds)
        ended.update({name: array.numpy() for name, array in result.arrays.items()})

    run_server(server, InlineGrid(client_app, 2))
    return ended


@pytest.mark.parametrize(
    ("own", "strategy"),
    [
        ('weight = "num_samples"', FedAvg(fraction_evaluate=0.0, weighted_by_key="num_samples")),
        ('send = ["num_samples"]', FedAvg(fraction_evaluate=0.0, weighted_by_key="num_samples")),
        ('send = ["trained"]', Exclusive(fraction_evaluate=0.0)),
    ],
)
def test_strategies_that_read_other_keys_run(own: str, strategy: FedAvg, tmp_path: Path) -> None:
    app = ClientApp(mods=[mod_of(tmp_path, own, LITTLE)])

    @app.train()
    def train(message: Message, _: Context) -> Message:
        content = RecordDict({"arrays": ArrayRecord([message.content["arrays"]["0"].numpy() + np.float32(0.1)])})
        content["metrics"], content["config"] = MetricRecord({"num_samples": 10}), ConfigRecord({"trained": True})
        return Message(content, reply_to=message)

    found = federate(app, strategy, ArrayRecord([np.zeros(3, np.float32)]))
    np.testing.assert_allclose(found["0"], 0.1, atol=1e-4)


# ---- which arrays get noise ----------------------------------------------------------------------------------------


def test_whole_numbers_stay_whole_over_rounds_and_the_ledger_goes_on(tmp_path: Path) -> None:
    """FedAvg returns int64 as float64; a client that first answers in round 2 sees only that."""
    start = {"weight": np.zeros((3, 2), np.float32), "index": np.arange(4)}
    app = app_of(tmp_path, lambda given: {**given, "weight": given["weight"] + 1})
    found = federate(app, FedAvg(fraction_evaluate=0.0), record(start), rounds=3)
    assert (found["index"] == start["index"]).all() and line(tmp_path, 0)["participations"] == 3
    late = arrays(app(question({**start, "index": np.arange(4.0)}, number=2), context(partition=4)))
    assert (late["index"] == start["index"]).all() and late["index"].dtype == np.int64
    assert [tensors(tmp_path, client) for client in (0, 4)] == [[6], [6]]


FLOATS = {"body.weight": np.full((2, 3), 2.0, np.float32), "head.bias": np.zeros(4, np.float32)}


class Tied(nn.Module):
    """Two layers share a matrix, one is frozen, and one number is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out, self.table = nn.Linear(3, 2), nn.Linear(3, 5, bias=False), nn.Embedding(5, 3)
        self.out.weight = self.table.weight
        self.body.requires_grad_(False)
        self.register_buffer("scale", self.table.weight.detach()[0].clone())


@pytest.mark.parametrize("pattern", ["head.*", "*.bias", "head.bias"])
def test_only_arrays_that_are_named_get_noise(pattern: str, tmp_path: Path) -> None:
    app = app_of(tmp_path, lambda given: {name: value + 1 for name, value in given.items()}, f'trained = ["{pattern}"]')
    reply = arrays(app(question(FLOATS), context()))
    assert (reply["body.weight"] == 2).all() and (reply["head.bias"] != 0).all()
    assert tensors(tmp_path) == [4]
    wrong = app_of(tmp_path, longer, 'trained = ["tail"]')
    with pytest.raises(WrongAppError, match=r"privatise.trained = 'tail': no floating-point array has such a name"):
        wrong(question(FLOATS), context(partition=8))


def test_a_network_that_the_settings_name_says_what_is_trained(tmp_path: Path) -> None:
    """Frozen layers and constants leave as they came, and a tied tensor is one; random numbers stay as they are."""
    start = {name: value.numpy() for name, value in Tied().state_dict().items()}
    text = f'[mechanism]\nname = "gaussian"\nsigma = 9.0\n[privatise]\nfolder = "{tmp_path / "privacy"}"\n'
    path = settings(tmp_path, f'{text}[tap]\nmodel = "{__name__}:Tied"\n')
    for listed in (False, True):
        sent = {str(place): value for place, value in enumerate(start.values())} if listed else start
        app = client([privatise(path)], lambda given: {name: value + 1 for name, value in given.items()})
        torch.manual_seed(5)
        reply = dict(zip(start, arrays(app(question(sent), context(partition=int(listed)))).values(), strict=True))
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
        moved = {name for name, value in start.items() if (reply[name] != value).any()}
        assert moved == {"out.weight", "table.weight"} and (reply["out.weight"] == reply["table.weight"]).all()
        assert tensors(tmp_path, int(listed)) == [15]


def test_noise_for_nothing_is_said_and_stays_without_a_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What one training moves depends on data, so it decides nothing by itself."""

    def trained(given: Arrays) -> Arrays:
        net = Tied()
        net.load_state_dict({name: torch.tensor(value) for name, value in given.items()})
        net.forward = lambda x: net.out(net.table(x)).square().sum()
        optimizer = torch.optim.SGD([value for value in net.parameters() if value.requires_grad], lr=0.1)
        net(torch.tensor([1, 2])).backward()
        optimizer.step()
        return {name: value.numpy() for name, value in net.state_dict().items()}

    start = {name: value.numpy() for name, value in Tied().state_dict().items()}
    reply = arrays(app_of(tmp_path, trained)(question(start), context()))
    assert all((reply[name] != value).any() for name, value in start.items())
    left = '["out.weight", "table.weight"]'
    assert f"on scale, body.weight, body.bias, which training did not change: privatise.trained = {left}" in caplog.text
    assert "on table.weight, a second copy of another array: tap.model" in caplog.text


@pytest.mark.parametrize(
    ("mechanism", "said"),
    [
        ('name = "gaussian"\nsigma = 0.5', "d = 62,006 trained numbers; the norm of the noise is 125 against 1 of"),
        ('name = "laplace"\nscale = 0.01\nclip_norm = 3.0', "the norm of the noise is 10.6 against 0.012 of"),
        ('name = "vmf"\nkappa = 1e5\nclip_norm = 2.0', "against"),
    ],
)
def test_how_much_noise_there_will_be_is_said_before_the_first_training(
    mechanism: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of normal noise sigma * clip * sqrt(d), of Laplace noise scale * clip * sqrt(2 d); the update has equal parts."""

    def trained(given: Arrays) -> Arrays:
        assert said in caplog.text and ("drowns" in caplog.text) is ("vmf" not in mechanism)
        return {"w": given["w"] + 1}

    app = app_of(tmp_path, trained, mechanism=mechanism)
    for number in (1, 2):
        app(question({"w": np.zeros(62_006, np.float32)}, number=number), context())
    assert caplog.text.count("the norm of the noise") == 1 and "the app failed" not in caplog.text


@pytest.mark.parametrize("form", ["weights", "update", "negated update", "gradient"])
def test_replies_of_every_form_are_clipped_and_have_that_form(form: str, tmp_path: Path) -> None:
    """The update is 10 clip norms long, whatever the app replies; with next to no noise one clip norm leaves."""
    sign = -1 if form == "negated update" else 1

    def trained(given: Arrays) -> Arrays:
        after = longer(given)
        return after if form == "weights" else {name: np.asarray(sign * (after[name] - given[name])) for name in given}

    reply = asked(app_of(tmp_path, trained, f'reply = "{form}"', LITTLE))
    left = sign * (reply["weight"] - (BEFORE["weight"] if form == "weights" else 0))
    assert left[0, 0] == pytest.approx(CLIP, abs=1e-3) and np.abs(left).sum() == pytest.approx(CLIP, abs=0.05)
    assert (reply["bn.running_var"] == (form == "weights")).all()


# ---- running statistics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("released", [True, False])
def test_running_statistics_are_said_or_released_with_a_ledger_of_their_own(
    named: bool, released: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With much noise, too, no variance is below zero; in a list they are told by being positive."""
    start = {"w": np.zeros(6, np.float32), "bn.running_mean": np.zeros(40, np.float32)}
    start["bn.running_var"] = np.ones(40, np.float32)
    names = [*start] if named else ["0", "1", "2"]
    own = "[privatise.statistics]\nname = 'gaussian'\nsigma = 3.0\nclip_norm = 1.5" if released and named else ""
    app = app_of(tmp_path, lambda given: {name: value + 1 for name, value in given.items()}, own)
    reply = arrays(app(question(dict(zip(names, start.values(), strict=True))), context()))
    mean, variance = reply[names[1]], reply[names[2]]
    moves = released or not named
    assert (mean != 0).any() is np.bool_(moves) and (variance >= 0).all() and (variance != 1).any() is np.bool_(moves)
    assert ("running statistics (bn.running_mean, bn.running_var) are sent back" in caplog.text) is (
        named and not released
    )
    if released and named:
        own_line = json.loads((tmp_path / "privacy" / "client-3-statistics.json").read_text())
        assert (own_line["noise"], own_line["participations"]) == (3.0, 1)
        assert tensors(tmp_path, 3, "-statistics") == [40, 40]
        noise = mean - np.float32(1.5 / math.sqrt(80))
        assert 5e-7 < stats.chi2.cdf(float((noise**2).sum()) / (3.0 * 1.5) ** 2, 40) < 1 - 5e-7
        assert any("client-K.json, client-K-statistics.json" in note for note in line(tmp_path)["notes"])


# ---- counts, histograms, survival curves ---------------------------------------------------------------------------

HISTOGRAM = """
[[privatise.metrics]]
name = "survival/deaths"
type = "query"
size = 400
whole = {whole}
mechanism = {{ name = "{name}", {noise}, clip_norm = 50.0 }}
"""
MET = (
    "[[privatise.metrics]]\nname = 'train_loss'\nmechanism = { name = 'laplace', scale = 0.5, clip_norm = 4.0 }\n"
    "[[privatise.metrics]]\nname = 'arrays.more/x'\nsize = 2\nmechanism = { name = 'gaussian', sigma = 0.1 }"
)


def answering(folder: Path, deaths: Callable[[], np.ndarray], own: str) -> ClientApp:
    app = ClientApp(mods=[mod_of(folder, own)])

    @app.query()
    @app.query("other")
    def query(message: Message, _: Context) -> Message:
        return Message(RecordDict({"survival": record({"deaths": deaths(), "T": np.ones(9)})}), reply_to=message)

    return app


def failed() -> np.ndarray:
    raise ValueError("seven")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("name", "noise", "law"), [("gaussian", "sigma = 2.0", "norm"), ("laplace", "scale = 2.0", "laplace")]
)
@pytest.mark.parametrize(
    ("deaths", "sent"),
    [(lambda: np.full(400, 0.5), 0.0), (lambda: np.ones(7), 0.0), (failed, 0.0), (lambda: np.eye(400)[0] * 900, 50.0)],
    ids=["long", "other size", "failed", "one cell"],
)
def test_numbers_of_queries_leave_with_noise_and_a_ledger_of_their_own(
    deaths: Callable[[], np.ndarray], sent: float, name: str, noise: str, law: str, whole: bool, tmp_path: Path
) -> None:
    """All numbers together are bounded by clip_norm, then noise of its scale; Kolmogorov-Smirnov, false alarm 1e-6."""
    own = HISTOGRAM.format(whole=str(whole).lower(), name=name, noise=noise)
    reply = answering(tmp_path, deaths, own)(question({}, "query"), context()).content
    assert [*reply] == ["survival"] and [*reply["survival"]] == ["deaths"]
    left = reply["survival"]["deaths"].numpy()
    assert left.shape == (400,) and bool((left == left.round()).all()) is whole
    assert stats.kstest(left[1:], getattr(stats, law)(0, 2.0 * 50).cdf).pvalue > 1e-6
    assert abs(left[0] - sent) < 100 * 20
    told = json.loads((tmp_path / "privacy" / "client-3-survival.deaths.json").read_text())
    assert (told["participations"], told["noise"]) == (1, 2.0) and not (tmp_path / "privacy" / "client-3.json").exists()
    with pytest.raises(RefusedError, match=r"not to query\.other"):
        answering(tmp_path, deaths, own)(question({}, "query.other"), context())


def test_metrics_of_training_leave_with_noise_next_to_the_update(tmp_path: Path) -> None:
    replies = [app_of(tmp_path, trained, MET)(question(BEFORE), context()) for trained in (longer, raising(Panic()))]
    for reply in replies:
        assert [*reply.content] == ["arrays", "metrics", "arrays.more"]
        assert set(reply.content["metrics"]) == {"num-examples", "train_loss"}
        assert reply.content["arrays.more"]["x"].numpy().shape == (2,)
    assert [tensors(tmp_path, 3, part) for part in ("-train_loss", "-arrays.more.x")] == [[1], [2]]
    assert any(
        "client-K.json, client-K-train_loss.json, client-K-arrays.more.x.json" in n for n in line(tmp_path)["notes"]
    )


# ---- what is wrong with an app -------------------------------------------------------------------------------------


def old_question() -> Message:
    content = compat.fitins_to_recorddict(FitIns(ndarrays_to_parameters([np.zeros((2, 2), np.float32)]), {}), True)
    message = question({})
    message.content = content
    return message


@pytest.mark.parametrize(
    ("own", "wrong"),
    [
        ("", None),
        ('record = "fitins.parameters"', None),
        ('record = "arrays"', r"record = 'arrays': the message has fitins\.parameters"),
        ('reply_record = "arrays"', r"reply_record = 'arrays': the reply has fitres\.parameters"),
    ],
)
def test_a_numpy_client_is_answered_in_its_records(own: str, wrong: str | None, tmp_path: Path) -> None:
    app = ClientApp(client_fn=lambda _: Old().to_client(), mods=[mod_of(tmp_path, own, LITTLE)])
    if wrong is not None:
        with pytest.raises(WrongAppError, match=wrong):
            app(old_question(), context())
        return
    reply = compat.recorddict_to_fitres(app(old_question(), context()).content, keep_input=True)
    assert (reply.num_examples, reply.metrics, reply.status.code) == (1, {}, Code.OK)
    np.testing.assert_allclose(parameters_to_ndarrays(reply.parameters), 0.3, atol=1e-4)


@pytest.mark.parametrize(
    ("sent", "replied", "said"),
    [
        ({"0": np.zeros(9, np.uint8)}, {"0": np.ones(9, np.uint8)}, "no floating-point array .* but uint8: bytes of"),
        ({}, {"0": np.ones(9, np.uint8)}, "no floating-point array .* but nothing"),
        (
            {"w": np.zeros(3)},
            {"embedding": np.ones((4, 3))},
            "the reply's arrays has none of the arrays that were sent",
        ),
    ],
)
def test_what_no_noise_fits_is_refused_in_one_line(sent: Arrays, replied: Arrays, said: str, tmp_path: Path) -> None:
    """Trees travel as bytes, and embeddings are no update: refused, not drowned in silence."""
    with pytest.raises(WrongAppError, match=said) as caught:
        app_of(tmp_path, lambda _: replied)(question(sent), context())
    assert "\n" not in str(caught.value)
    assert (tmp_path / "privacy").exists() is ("reply" in said)


def test_a_mod_that_is_given_twice_is_one_line(tmp_path: Path) -> None:
    path = settings(tmp_path, f'[mechanism]\nname = "gaussian"\nsigma = 1.0\n[privatise]\nfolder = "{tmp_path}"\n')
    with pytest.raises(WrongAppError, match="privatise is given twice"):
        asked(client([privatise(path), privatise(path)], longer))


@pytest.mark.parametrize("stage", ["setup", "share_keys", "collect_masked_vectors", "unmask"])
def test_before_secure_aggregation_it_is_refused(stage: str, tmp_path: Path) -> None:
    message = question(BEFORE)
    message.content["secaggplus_configs"] = ConfigRecord({"stage": stage})
    with pytest.raises(WrongAppError, match="privatise comes after secaggplus_mod"):
        app_of(tmp_path, longer)(message, context())


def test_failures_are_counted_in_the_clients_own_ledger(tmp_path: Path) -> None:
    for number, trained in enumerate([longer, raising(ValueError("seven")), longer, raising(Panic("seven"))], 1):
        asked(app_of(tmp_path, trained), number)
    assert line(tmp_path)["participations"] == 4
    assert (
        "the app failed 2 times, and these updates were zero; this file stays at the client" in line(tmp_path)["notes"]
    )


def test_a_ledger_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Its first line names no arrays."""
    asked(app_of(tmp_path, longer))
    path = tmp_path / "privacy" / "client-3.jsonl"
    opening, *rest = path.read_text().splitlines(keepends=True)
    told = json.loads(opening)
    del told["layout"]
    path.write_text("".join([json.dumps(told) + "\n", *rest]))
    asked(app_of(tmp_path, longer), 2)
    assert line(tmp_path)["participations"] == 2


# ---- metrics, budget, noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "sent"), [("", {"num-examples": 1}), ("send = ['num-examples']", {"num-examples": 77})]
)
def test_metrics_stay_at_the_client(own: str, sent: dict[str, int], tmp_path: Path) -> None:
    reply = app_of(tmp_path, longer, own)(question(BEFORE), context())
    assert dict(reply.content.metric_records["metrics"]) == sent
    assert any("not covered" in note for note in line(tmp_path)["notes"]) is bool(own)


def test_a_restart_gives_no_budget_back(tmp_path: Path) -> None:
    """Epsilon against the closed form of Balle and Wang 2018 for two updates that differ by twice the clip norm."""
    for number in (1, 2, 3):
        asked(app_of(tmp_path, longer, "rounds = 3"), number, context(run=number))
    found = line(tmp_path)
    assert found["participations"] == 3
    mu = 2 * math.sqrt(3) / SIGMA

    def delta(epsilon: float) -> float:
        normal = stats.norm.cdf
        return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)

    exact = optimize.brentq(lambda epsilon: delta(epsilon) - found["delta"], 1, 300)
    assert found["epsilon"] == pytest.approx(exact, rel=1e-6)
    with pytest.raises(RefusedError, match=r"answered 3 times, as often as privatise\.rounds allows"):
        asked(app_of(tmp_path, longer, "rounds = 3"), 4, context(run=9))
    assert asked(app_of(tmp_path, longer, "rounds = 3"), 1, context(partition=2))
    assert line(tmp_path)["participations"] == 3


def test_an_answer_that_was_cut_off_counts(tmp_path: Path) -> None:
    asked(app_of(tmp_path, longer))
    with (tmp_path / "privacy" / "client-3.jsonl").open("a") as file:
        file.write('{"answ')
    asked(app_of(tmp_path, longer))
    assert line(tmp_path)["participations"] == 3


def test_a_client_stops_at_its_epsilon_whatever_its_data(tmp_path: Path) -> None:
    asked(app_of(tmp_path, longer, "target_epsilon = 60"))
    with pytest.raises(RefusedError, match=r"one more would take it above privatise\.target_epsilon = 60"):
        for _ in range(20):
            asked(app_of(tmp_path, raising(ValueError("seven")), "target_epsilon = 60"))
    assert line(tmp_path)["epsilon"] <= 60


def test_noise_is_calibrated_to_the_rounds(tmp_path: Path) -> None:
    mechanism = 'name = "gaussian"\ntarget_epsilon = 8.0\nclip_norm = 2.0'
    app = app_of(tmp_path, longer, "rounds = 2", mechanism)
    asked(app)
    asked(app, 2)
    assert 7.9 < line(tmp_path)["epsilon"] <= 8


def test_each_answer_has_noise_of_its_own_and_a_seed_repeats_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (app_of(tmp_path / part, longer, "seed = 4") for part in "ab")
    same = [released(asked(first)), released(asked(first))]
    assert not np.allclose(*same)
    assert (released(asked(second)) == same[0]).all()
    assert any("privatise.seed" in note for note in line(tmp_path / "a")["notes"])


def test_a_restart_elsewhere_and_a_new_version_go_on_with_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower unpacks each version of an app into a folder of its own, and runs it where the SuperNode was started."""
    keys = f'[privatise]\nrounds = 2\nfolder = "{tmp_path / "privacy"}"'

    def version(name: str) -> dict[str, np.ndarray]:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        text = f'[mechanism]\nname = "gaussian"\nsigma = 4.0\n{keys}'
        return asked(client([privatise(settings(tmp_path / name, text))], longer))

    version("one")
    version("two")
    with pytest.raises(RefusedError, match="client 3 has answered 2 times"):
        version("three")
    assert line(tmp_path)["participations"] == 2


@pytest.mark.parametrize("noise", ["sigma = 4.0", "target_epsilon = 1.0"])
def test_noise_that_no_client_adds_is_refused_in_one_line(noise: str, tmp_path: Path) -> None:
    """Nobody between this client and its server adds it: the clipped update would leave as it is."""
    text = f'[mechanism]\nname = "central"\n{noise}\n[privatise]\nrounds = 3\nfolder = "{tmp_path / "privacy"}"'
    with pytest.raises(InputError, match=r"fedpriv\.toml: .*'central': would leave without noise here") as caught:
        privatise(settings(tmp_path, text))
    allowed = str(caught.value).partition("allowed: ")[2]
    assert "gaussian" in allowed and "central" not in allowed
    assert "\n" not in str(caught.value) and not (tmp_path / "privacy").exists()


@pytest.mark.parametrize(
    ("name", "expected"), [("central", "'central': would leave without"), ("distributed", "a reply alone has a share")]
)
def test_nothing_is_released_where_nobody_checked_the_settings(name: str, expected: str, tmp_path: Path) -> None:
    """Whoever makes the mod by hand gets no upload, and no line in a ledger."""
    unchecked = FlowerSettings.model_construct(
        privatise=PrivatiseSettings(folder=tmp_path / "privacy"),
        mechanism=mechanism_settings({"name": name, "sigma": 4.0}),
    )
    with pytest.raises(InputError, match=expected):
        asked(client([Privatiser(unchecked)], longer))
    assert not (tmp_path / "privacy").exists()


def test_a_ledger_is_of_one_mechanism(tmp_path: Path) -> None:
    asked(app_of(tmp_path, longer))
    with pytest.raises(InputError, match="is the ledger of another mechanism or model"):
        asked(app_of(tmp_path, longer, mechanism='name = "gaussian"\nsigma = 9.0\nclip_norm = 2.0'))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "privatise needs a mechanism"),
        ('[mechanism]\nname = "gaussian"\nsigma = 1.0\nunit = "example"', "a mod sees a client's whole update"),
        ('[mechanism]\nname = "gaussian"\nepsilon = 0.0', "epsilon"),
        ('[mechanism]\nname = "gaussian"\ntarget_epsilon = 1.0', "target_epsilon needs privatise.rounds"),
        ('[mechanism]\nname = "gaussian"\nsigma = 1.0\n[privatise]\nround = 3', "unknown key privatise.round"),
        (
            '[mechanism]\nname = "gaussian"\nsigma = 1.0\n[[privatise.metrics]]\nname = "n"\n'
            'mechanism = { name = "gaussian", target_epsilon = 1.0 }',
            "privatise.metrics have ledgers of their own: give each a mechanism with the noise itself",
        ),
        ('[mechanism]\nname = "hgm"\nsigma = 1.0', "'hgm' shares its noise out by a public model"),
        ('[mechanism]\nname = "gaussian"\nsigma = 1.0', "privatise.folder is not set: allowed is an absolute path"),
        *(
            (
                f'[mechanism]\nname = "gaussian"\nsigma = 1.0\n[privatise]\nfolder = "{folder}"',
                f"privatise.folder = '{folder}': allowed is an absolute path",
            )
            for folder in ("privacy", "./privacy", "~/privacy", "")
        ),
    ],
)
def test_wrong_settings_are_one_line(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        privatise(settings(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_the_folder_that_is_proposed_bears_the_apps_name(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "hospital"\n')
    with pytest.raises(InputError, match="such as /var/lib/hospital/privacy"):
        privatise(settings(tmp_path, '[mechanism]\nname = "gaussian"\nsigma = 1.0'))


def test_settings_are_looked_for_from_the_module_upwards(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"fedpriv.toml is neither in .* nor in a folder above it"):
        privatise(tmp_path / "app" / "client_app.py")
    settings(tmp_path, f'[mechanism]\nname = "gaussian"\nsigma = 1.0\n[privatise]\nfolder = "{tmp_path}"')
    assert privatise(tmp_path / "app" / "client_app.py")


def test_a_message_without_parameters_is_said(tmp_path: Path) -> None:
    app = app_of(tmp_path, longer, 'record = "weights"')
    with pytest.raises(InputError, match="record = 'weights': the message has arrays"):
        asked(app)
