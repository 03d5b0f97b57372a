"""The mod that privatises anybody's app; the mistakes of mods that others wrote are tests here."""

import json
import math
import signal
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context
from scipy import optimize, stats

from fedpriv.core.errors import InputError, RefusedError
from fedpriv.flower import privatise
from fedpriv.flower.app_settings import FlowerSettings, PrivatiseSettings
from fedpriv.flower.privatise import Privatiser
from fedpriv.mechanisms import mechanism_settings
from tests.flower.apps import Arrays, arrays, client, context, question, settings

SIGMA, CLIP = 0.5, 2.0
BEFORE = {
    "weight": np.full((40, 50), 3.0, np.float32),
    "bias": np.zeros(50, np.float32),
    "bn.running_var": np.ones(5, np.float32),
    "bn.num_batches_tracked": np.array(7),
}


def app_of(folder: Path, trained: Callable[[Arrays], Arrays], own: str = "", mechanism: str | None = None):
    named = mechanism or f'name = "gaussian"\nsigma = {SIGMA}\nclip_norm = {CLIP}'
    text = f'[mechanism]\n{named}\n[privatise]\nfolder = "{folder / "privacy"}"\n{own}\n'
    return client([privatise(settings(folder, text))], trained)


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


def test_why_an_app_failed_is_in_the_clients_own_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked(app_of(tmp_path, raising(Panic("this digit is a seven"))))
    assert "this digit is a seven" in caplog.text and "its update counts as zero" in caplog.text


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


def test_evaluation_is_untouched_and_not_counted(tmp_path: Path) -> None:
    reply = app_of(tmp_path, longer)(question(BEFORE, "evaluate"), context())
    assert all((arrays(reply)[name] == value).all() for name, value in BEFORE.items())
    assert reply.content.metric_records["metrics"]["accuracy"] == 0.5
    assert not (tmp_path / "privacy").exists()


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
@pytest.mark.parametrize("name", ["central", "distributed"])
def test_noise_that_no_client_adds_is_refused_in_one_line(name: str, noise: str, tmp_path: Path) -> None:
    """Nobody between this client and its server adds it: the clipped update would leave as it is."""
    text = f'[mechanism]\nname = "{name}"\n{noise}\n[privatise]\nrounds = 3\nfolder = "{tmp_path / "privacy"}"'
    with pytest.raises(InputError, match=rf"fedpriv\.toml: .*'{name}': would leave without noise here") as caught:
        privatise(settings(tmp_path, text))
    allowed = str(caught.value).partition("allowed: ")[2]
    assert "gaussian" in allowed and "central" not in allowed and "distributed" not in allowed
    assert "\n" not in str(caught.value) and not (tmp_path / "privacy").exists()


@pytest.mark.parametrize("name", ["central", "distributed"])
def test_nothing_is_released_where_nobody_checked_the_settings(name: str, tmp_path: Path) -> None:
    """Whoever makes the mod by hand gets no upload, and no line in a ledger."""
    unchecked = FlowerSettings.model_construct(
        privatise=PrivatiseSettings(folder=tmp_path / "privacy"),
        mechanism=mechanism_settings({"name": name, "sigma": 4.0}),
    )
    with pytest.raises(InputError, match=f"'{name}': would leave without noise here"):
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


def test_settings_are_looked_for_from_the_module_upwards(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"fedpriv.toml is neither in .* nor in a folder above it"):
        privatise(tmp_path / "app" / "client_app.py")
    settings(tmp_path, f'[mechanism]\nname = "gaussian"\nsigma = 1.0\n[privatise]\nfolder = "{tmp_path}"')
    assert privatise(tmp_path / "app" / "client_app.py")


def test_a_message_without_parameters_is_said(tmp_path: Path) -> None:
    app = app_of(tmp_path, longer, 'record = "weights"')
    with pytest.raises(InputError, match="record = 'weights': the message has arrays"):
        asked(app)
