"""Noise of other libraries is recognised whatever the order of mods, told by [tap.noise], and used by attacks."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import LocalDpMod as OlderLocalDpMod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.clientapp.typing import ClientAppCallable

from fedpriv.attacks.observation import read_observation
from fedpriv.core.errors import InputError
from fedpriv.core.progress import Silent
from fedpriv.flower import privatise, tap
from fedpriv.flower.app_settings import read_settings
from fedpriv.flower.attack import attack_tapped
from fedpriv.flower.audit.audit import leaving
from fedpriv.flower.audit.claims import claims
from fedpriv.flower.audit.observers import ObservedApp, observing_mods
from fedpriv.flower.audit.simulation import read_answers
from fedpriv.flower.folder import read_exchanges
from tests.cases import in_one_test
from tests.flower.apps import Old, arrays, client, context, question, record, settings
from tests.flower.audited import AVERAGE, LOCAL, OPACUS, SCALAR, USUAL, importable, observed, write_app
from tests.flower.test_flower_audit import normal_delta
from tests.flower.test_flower_privatise import old_question

KNOWN = """[tap]
shape = [1, 8, 8]
classes = 10
batch_size = 8
local_steps = 2
learning_rate = 0.5
optimizer = "sgd"
"""
ROUNDING = """
def rounding(message, context, call_next):
    reply = call_next(message, context)
    after = reply.content["arrays"].to_torch_state_dict()
    reply.content["arrays"] = ArrayRecord({key: value.round(decimals=2) for key, value in after.items()})
    return reply
"""
NOISE = '[mechanism]\nname = "gaussian"\nsigma = 3.0\nclip_norm = 0.1\n[privatise]\nfolder = "{}"\n'


@pytest.mark.parametrize("case", ["LocalDpMod", "Opacus", "scalar", "none", "changed"])
def test_what_noise_an_upload_has_is_recognised(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real apps: the observation has the mechanism, the ledger the line, and no word says unprotected."""
    half = {"imports": ROUNDING, "mods": "rounding"}
    client = {"LocalDpMod": LOCAL, "Opacus": OPACUS, "scalar": SCALAR, "none": USUAL, "changed": half}[case]
    app = write_app(tmp_path / "app", client, AVERAGE, rounds=1)
    found = observed(app, tmp_path / "out", 2, monkeypatch)
    folder = tmp_path / "out" / "tap-1"
    (exchange, _) = read_exchanges(folder)
    assert exchange.noise == {"LocalDpMod": case, "Opacus": case, "scalar": "LocalDpMod"}.get(case, "")
    assert exchange.changed is (case == "changed")
    mechanism = read_observation(folder / "observations" / "0001-0000.safetensors").settings.mechanism
    line = folder / "ledger" / "0001-0000.json"
    assert line.is_file() is (case not in ("none", "changed"))
    told = json.loads(line.read_text()) if line.is_file() else {"epsilon": None}
    if case == "LocalDpMod":
        assert (mechanism["unit"], mechanism["sigma"]) == ("update", pytest.approx(0.60561, rel=1e-4))
        assert normal_delta(told["epsilon"], 2 / mechanism["sigma"]) == pytest.approx(1e-5, rel=1e-6)
    elif case == "Opacus":
        assert (mechanism["unit"], mechanism["sigma"], mechanism["clip_norm"]) == ("example", 1.1, 1.0)
        assert told["epsilon"] == pytest.approx(found.claims["Opacus"].epsilon)
    else:
        assert told["epsilon"] is None
    about = json.loads((folder / "tap.json").read_text()) | {"model": "digits.client_app:Net"}
    (folder / "tap.json").write_text(json.dumps(about))
    with importable(app, monkeypatch):
        summary = attack_tapped(folder, ["iga"], ["1-0"], ["adversary.iga.iterations=5"], Silent())
    said, kind = summary.verdict[-1], summary.attacks[0].upload
    words = {
        "none": ("unprotected", "no mechanism of fedpriv.flower.privatise, LocalDpMod or Opacus acted"),
        "changed": ("changed", "what changed 1-0 after training is not known: [tap.noise] says it"),
        "scalar": ("protected", "no epsilon (LocalDpMod neither clips nor noises arrays without dimensions: scale)"),
    }
    assert (kind, True) == (words.get(case, ("protected",))[0], words.get(case, ("", f"of {case}"))[1] in said)


ORDERS = {
    "tap, LocalDpMod": "LocalDpMod",
    "tap, privatise, LocalDpMod": "privatise",
    "tap, LocalDpMod, privatise": "privatise",
    "privatise, tap, LocalDpMod": "privatise",
    "LocalDpMod, tap": "LocalDpMod comes before the tap",
    "LocalDpMod, privatise, tap": "LocalDpMod comes before the tap",
    "tap": "",
}


@pytest.mark.parametrize("order", ORDERS)
def test_mods_in_every_order_are_claimed_once_by_the_tap(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))
    path = settings(tmp_path, KNOWN + NOISE.format(tmp_path / "p"))
    made = {"tap": lambda: tap(path), "privatise": lambda: privatise(path)}
    mods = [made.get(name, lambda: LocalDpMod(1.0, 1.0, 8.0, 1e-5))() for name in order.split(", ")]
    app = client(mods, lambda given: {"w": given["w"] + 1})
    home = context()
    for number in (1, 2):
        app(question({"w": np.zeros((4, 16), np.float32)}, number=number), home)
    (exchange,) = read_exchanges(tmp_path / "tap-1")
    expected = ORDERS[order]
    if "before" in expected:
        assert expected in exchange.unattacked and not [*(tmp_path / "tap-1" / "observations").iterdir()]
    else:
        assert (exchange.noise, exchange.protected) == (expected, bool(expected))


AROUND = {
    "returned": "",
    "frozen": "",
    "beside": "LocalDpMod was not given v",
    "counts": "LocalDpMod was not given counts",
    "bytes": "w leaves otherwise than LocalDpMod returned it",
    "before": "w leaves otherwise than LocalDpMod returned it",
    "start": "LocalDpMod clips what changes w, which is not as the server sent it",
}


@pytest.mark.parametrize("case", AROUND)
def test_noise_of_a_mod_that_an_apps_own_mod_calls_is_claimed(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As apps do that read epsilon from their run's config; where an array goes around it nothing is proven."""
    np.random.set_bit_generator(np.random.MT19937())  # other tests seed it
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))
    beside = {"frozen": {"v": np.ones(3, np.float32)}, "beside": {"v": np.full(3, 1.5)}, "counts": {"counts": [3, 0]}}
    put = beside | {"before": {"w": np.ones((4, 16), np.float32)}, "bytes": {"w": b"encrypted"}}
    start = np.full((4, 16), 1.0 if case == "start" else 0.0, np.float32)

    def calling(message: Message, home: Context, call_next: ClientAppCallable) -> Message:
        message.content["arrays"] = record({"w": start})
        reply = LocalDpMod(1.0, 1.0, 8.0, 1e-5)(message, home, call_next)
        whole = arrays(reply) | {name: np.asarray(value) for name, value in put.get(case, {}).items()}
        reply.content["arrays"] = record(whole)
        return reply

    known = read_settings(settings(tmp_path, KNOWN)).tap
    assert known is not None
    sent = {"w": np.zeros((4, 16), np.float32)} | ({"v": np.ones(3, np.float32)} if "v" in put.get(case, {}) else {})
    with observing_mods(tmp_path, known, tmp_path):
        app = client([calling], lambda given: {"w": given["w"] + 1})
        ObservedApp(app, tmp_path)(question(sent), context())
    answers = read_answers(tmp_path)
    (claim,) = claims(answers, (), (), tmp_path)
    line = tmp_path / "tap-1" / "ledger" / "0001-0003.json"
    told = json.loads(line.read_text()) if case != "bytes" else {"epsilon": None}
    assert claim.what == "LocalDpMod" and line.exists() is (case != "bytes")
    assert read_exchanges(tmp_path / "tap-1")[0].noise == ("LocalDpMod" if line.exists() else "")
    assert (claim.epsilon is not None) is (told["epsilon"] is not None) is (AROUND[case] == "")
    assert AROUND[case] in claim.theorem
    if case == "returned":
        assert leaving(answers)[0].why == "calling calls LocalDpMod; whether it changes more is not known"


BESIDE: dict[str, tuple[str, Any, bool]] = {
    "arrays": ("raw", record({"w": np.ones(64, np.float32)}), True),
    "the same name": ("raw", record({"w": np.ones((4, 16), np.float32)}), True),
    "bytes": ("model", ConfigRecord({"trees": b"thresholds"}), True),
    "a histogram": ("counts", MetricRecord({"labels": [3, 1, 4]}), True),
    "a long text": ("notes", ConfigRecord({"counts": str(list(range(100)))}), True),
    "a status": ("notes", ConfigRecord({"status": "trained"}), False),
    "sent": ("state", ConfigRecord({"u": b"the server's"}), False),
    "a number": ("more", MetricRecord({"accuracy": 0.5}), False),
    "none": ("empty", record({}), False),
}


@pytest.mark.parametrize("told", [False, True])
@in_one_test("case", BESIDE)
def test_what_an_outer_mod_adds_to_a_noised_reply_is_not_covered(
    told: bool, case: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gets it with the noised arrays; numbers alone have lines of their own in an audit."""
    np.random.set_bit_generator(np.random.MT19937())  # other tests seed it
    home = tmp_path_factory.mktemp("beside")
    monkeypatch.setenv("FEDPRIV_RUNS", str(home))
    name, added, counts = BESIDE[case]

    def adding(message: Message, home: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, home)
        reply.content[name] = added
        return reply

    noise = '[tap.noise]\nname = "gaussian"\nunit = "update"\nsigma = 3.0\nclip_norm = 0.1\n' if told else ""
    mods = [tap(settings(home, KNOWN + noise)), adding, *([] if told else [LocalDpMod(1.0, 1.0, 8.0, 1e-5)])]
    app = client(mods, lambda given: {"w": given["w"] + 1})
    sent = question({"w": np.zeros((4, 16), np.float32)})
    sent.content["before"] = ConfigRecord({"u": b"the server's"})
    ObservedApp(app, home)(sent, context())
    line = json.loads((home / "tap-1" / "ledger" / "0001-0003.json").read_text())
    assert (line["epsilon"] is None) is counts
    if not told:
        (answer,) = read_answers(home)
        key = next(iter(added), "")
        assert answer.noises[0].doubt == (f"{name}.{key} leaves as well, and no noise in it is known" if counts else "")


def test_two_calls_of_a_mod_on_parts_are_two_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each clips and noises its own arrays, and both leave."""
    np.random.set_bit_generator(np.random.MT19937())
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))

    def parts(message: Message, home: Context, call_next: ClientAppCallable) -> Message:
        own, noisy = arrays(message), dict[str, np.ndarray]()
        for name in own:
            message.content["arrays"] = record({name: own[name]})
            reply = LocalDpMod(1.0, 2.0, 8.0, 1e-5)(message, home, call_next)
            noisy |= arrays(reply)
        reply.content["arrays"] = record(noisy)
        return reply

    app = client([tap(settings(tmp_path, KNOWN)), parts], lambda given: {name: x + 1 for name, x in given.items()})
    app(question({"w": np.zeros((4, 16), np.float32), "v": np.ones(3, np.float32)}), context())
    told = json.loads((tmp_path / "tap-1" / "ledger" / "0001-0003.json").read_text())
    sigma = 2 * math.sqrt(2 * math.log(1.25 / 1e-5)) / 8
    assert normal_delta(told["epsilon"], 2 * math.sqrt(2) / sigma) == pytest.approx(1e-5, rel=1e-6)


def test_the_mod_of_older_apps_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower has it twice: flwr.client.mod and flwr.clientapp.mod."""
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))
    mods = [tap(settings(tmp_path, KNOWN)), OlderLocalDpMod(1.0, 1.0, 8.0, 1e-5)]
    ClientApp(client_fn=lambda _: Old().to_client(), mods=mods)(old_question(), context())
    (exchange,) = read_exchanges(tmp_path / "tap-1")
    assert (exchange.noise, exchange.protected) == ("LocalDpMod", True)


@pytest.mark.parametrize(
    ("given", "epsilon", "why"),
    [
        ((1.0, 1.0, 8.0, 1e-5), 8.0, "neither clips nor noises arrays without dimensions: norm.running_var, whole"),
        ((1.0, 1.0, 8.0, 1.0), 8.0, "delta = 1 is no probability below 1"),
        ((1.0, 1.0, math.inf, 1e-5), None, "there is no noise"),
        ((math.inf, 1.0, 8.0, 1e-5), 8.0, "the clipping norm is infinite"),
    ],
)
def test_what_is_stated_and_left_out(given: tuple[float, ...], epsilon: float | None, why: str, tmp_path: Path) -> None:
    """Whatever arrays without dimensions are called; and a mod that is no LocalDpMod by name has no cover by Opacus."""
    np.random.set_bit_generator(np.random.MT19937())  # other tests seed it
    app = client(
        [type("Own", (LocalDpMod,), {})(*given)],
        lambda given: {name: np.asarray(value + 1) for name, value in given.items()},
    )
    sent = {"w": np.zeros(3, np.float32), "norm.running_var": np.ones((), np.float32), "whole": np.ones(())}
    ObservedApp(app, tmp_path)(question(sent), context())
    (answer,) = read_answers(tmp_path)
    (noise,) = answer.noises
    assert noise.stated is not None and noise.stated.epsilon == epsilon and why in noise.why
    assert {each.verdict for each in leaving([answer]) if each.name == "arrays"} == {"uncovered"}


def test_a_counter_of_batches_leaves_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNorm's, which is a whole number in the first round: one client's may be another's plus seven."""
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))
    np.random.set_bit_generator(np.random.MT19937())
    mods = [tap(settings(tmp_path, KNOWN)), LocalDpMod(1.0, 1.0, 8.0, 1e-5)]
    app = client(mods, lambda given: {name: np.asarray(value + 7) for name, value in given.items()})
    sent = {"w": np.zeros((4, 16), np.float32), "counter": np.zeros((), np.int64)}
    reply = ObservedApp(app, tmp_path)(question(sent), context())
    assert reply.content.array_records["arrays"]["counter"].numpy() == 7
    (answer,) = read_answers(tmp_path)
    told = json.loads((tmp_path / "tap-1" / "ledger" / "0001-0003.json").read_text())
    why = "LocalDpMod neither clips nor noises arrays without dimensions: counter"
    assert (answer.noises[0].why, told["theorem"]["epsilon"], told["epsilon"]) == (why, f"none: {why}", None)


@pytest.mark.parametrize("step", [0, 1])
def test_noise_that_is_cut_to_whole_numbers_proves_nothing(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below one nearly none is left; where such an array has not changed, nothing left in it."""
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))
    np.random.set_bit_generator(np.random.MT19937())
    app = client(
        [LocalDpMod(8.0, 0.1, 8.0, 1e-5)], lambda given: {"w": given["w"] + 0.5, "counts": given["counts"] + step}
    )
    sent = {"w": np.zeros((4, 16), np.float32), "counts": np.zeros(3, np.int64)}
    reply = ObservedApp(app, tmp_path)(question(sent), context())
    assert reply.content.array_records["arrays"]["counts"].numpy().tolist() == [step] * 3  # as they were
    (answer,) = read_answers(tmp_path)
    assert answer.noises[0].why == ("LocalDpMod cuts the noise on counts to int64" if step else "")


def test_answers_to_every_type_of_training_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of the same data: the last one's line is about three releases."""
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))
    np.random.set_bit_generator(np.random.MT19937())  # other tests seed it
    home, app = context(), ClientApp(mods=[tap(settings(tmp_path, KNOWN)), LocalDpMod(1.0, 1.0, 8.0, 1e-5)])
    for number, action in enumerate(("body", "head", "tail"), 1):
        home = home if action != "tail" else context()  # as of a SuperNode that was started again
        moved = RecordDict({"arrays": record({"w": np.ones((4, 16), np.float32)})})
        app.train(action)(lambda given, _, moved=moved: Message(moved, reply_to=given))
        app(question({"w": np.zeros((4, 16), np.float32)}, f"train.{action}", number), home)
    lines = [json.loads(path.read_text()) for path in sorted((tmp_path / "tap-1" / "ledger").iterdir())]
    for answers, line in enumerate(lines, 1):
        assert normal_delta(line["epsilon"], 2 / 0.60561 * answers**0.5) == pytest.approx(1e-5, rel=1e-2)


TOLD = {  # and how far two neighbours are apart; the two steps that KNOWN tells may both have used the example
    "update": ('name = "gaussian"\nsigma = 2.0\nclip_norm = 0.5', 2 / 2.0),
    "laplace": ('name = "laplace"\nscale = 4.0\nclip_norm = 0.5', None),
    "example": ('name = "gaussian"\nunit = "example"\nsigma = 2.0\nclip_norm = 0.5', 2 / 2.0 * 2**0.5),
}


@pytest.mark.parametrize("case", TOLD)
def test_noise_that_is_told_is_used(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))
    text, mu = TOLD[case]
    app = client([tap(settings(tmp_path, f"{KNOWN}[tap.noise]\n{text}\n"))], lambda given: {"w": given["w"] + 1})
    app(question({"w": np.zeros((4, 16), np.float32)}), context())
    folder = tmp_path / "tap-1"
    assert read_exchanges(folder)[0].noise == "tap.noise"
    assert read_observation(folder / "observations" / "0001-0003.safetensors").settings.mechanism["clip_norm"] == 0.5
    line = json.loads((folder / "ledger" / "0001-0003.json").read_text())
    if mu is None:
        assert line["pure_epsilon"] == pytest.approx(2 / 4.0)
    else:
        assert line["ceilings"]["told"]["gamma"] < 1 and normal_delta(line["epsilon"], mu) == pytest.approx(
            1e-5, rel=1e-4
        )


@pytest.mark.parametrize(
    "text", ['name = "gaussian"', 'name = "none"', 'name = "gaussian"\nepsilon = 1.0', "sigma = 1.0"]
)
def test_noise_that_says_nothing_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_settings(settings(tmp_path, f"[tap.noise]\n{text}\n"))
    assert re.search(r"tap\.noise", str(caught.value)) and "\n" not in str(caught.value)


def test_nothing_of_flower_is_changed_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))
    before = LocalDpMod.__call__
    app = client([tap(tmp_path)], lambda given: given)  # type: ignore[arg-type, return-value]
    app(question({"w": np.zeros(2, np.float32)}), context())
    assert LocalDpMod.__call__ is before
