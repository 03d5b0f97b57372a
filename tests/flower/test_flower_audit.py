"""What an audit of real small apps says, against counter-examples that are measured and other accountants."""

import hashlib
import json
import math
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from select import select
from types import SimpleNamespace
from typing import Any

import dp_accounting
import numpy as np
import pytest
import scipy.stats
import torch
from dp_accounting import pld
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping as LegacyWrapper
from flwr.server.strategy import DPFedAvgFixed
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp.strategy import FedAvg
from opacus.data_loader import DPDataLoader
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from typer.testing import CliRunner

from fedpriv.core.cli.app import app as command_line
from fedpriv.core.errors import InputError
from fedpriv.core.progress import Silent
from fedpriv.engines.inline import InlineGrid
from fedpriv.flower import privatise, tap
from fedpriv.flower.app_settings import TapSettings, read_settings
from fedpriv.flower.audit.audit import _attacked, leaving, summed_up, write_audit_report
from fedpriv.flower.audit.claims import claims
from fedpriv.flower.audit.observers import ObservedApp, ServerNotes, _of_server, observing_mods, observing_strategies
from fedpriv.flower.audit.records import Answer, ModAction, Round, StrategyLayer
from fedpriv.flower.audit.simulation import (
    Simulated,
    _failed,
    _loaded,
    _loaded_apart,
    _overridden,
    _run_in_group,
    copied,
    observe,
    read_answers,
)
from fedpriv.flower.noise import Drawn, _of_local, hearing_loaders, numpy_is_seeded, observed_noise
from tests.command_line import fedpriv
from tests.flower.apps import client, context, question, record, settings
from tests.flower.audited import (
    AVERAGE,
    LOCAL,
    OPACUS,
    SCALAR,
    SCALE,
    UNEVEN,
    Observed,
    importable,
    observed,
    write_app,
)

DELTA, C = 1e-5, 0.5
OK = Status(Code.OK, "")
FIXED = "DifferentialPrivacy{}SideFixedClipping({}, noise_multiplier=1.0, clipping_norm=0.5, num_sampled_clients=4)"
ADAPTIVE = (
    "DifferentialPrivacy{}SideAdaptiveClipping(FedAvg(fraction_evaluate=0.0), noise_multiplier=1.0, "
    "num_sampled_clients=4, initial_clipping_norm=0.5, clipped_count_stddev=0.6)"
)
ACCOUNTED = """from flwr.supercore.privacy_accounting import *
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
CONFIG = PrivacyConfig(1e-5, 4, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)"""


def normal_delta(epsilon: float, mu: float) -> float:
    """Of two normal distributions mu deviations apart, by their tails."""
    tail = scipy.stats.norm.sf
    return float(tail(epsilon / mu - mu / 2) - math.exp(epsilon) * tail(epsilon / mu + mu / 2))


@pytest.fixture
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def run(client: dict[str, str], *server: str, clients: int = 4, rounds: int = 2, name: str = "a") -> Observed:
        app = write_app(tmp_path / name / "app", client, *(server or (AVERAGE,)), rounds=rounds)
        return observed(app, tmp_path / name / "out", clients, monkeypatch)

    return run


def test_local_dp_holds_less_than_it_says_and_its_noise_shows_it(audited) -> None:  # type: ignore[no-untyped-def]
    """Two clients with opposite updates are 3.3 deviations of its noise apart; then delta at 8 is 0.151, not 1e-5."""
    found = audited(LOCAL)
    claim = found.claims["LocalDpMod"]
    assert claim.once == pytest.approx(18.9, abs=0.01) and claim.falls_short and claim.releases == 2
    assert any("at epsilon 8 delta is 0.151 an answer" in note for note in claim.notes)
    size = 10_000
    way = np.full(size, size**-0.5, np.float32)  # of norm 1, to which both are clipped
    left = []
    for sign in (1.0, -1.0):
        app = client([LocalDpMod(1.0, 1.0, 8.0, DELTA)], lambda given, sign=sign: {"w": given["w"] + 9 * sign * way})
        replies = [app(question({"w": np.zeros(size, np.float32)}), context()) for _ in range(20)]
        left.append(np.stack([reply.content["arrays"]["w"].numpy() for reply in replies]))
    noise = float(np.std(left[0] - left[0].mean(0))) * math.sqrt(20 / 19)
    apart = float((left[0] @ way).mean() - (left[1] @ way).mean())
    mu = apart / noise  # standard error of the difference: 0.6 * sqrt(2 / 20) = 0.19 of 2
    assert mu == pytest.approx(2 / 0.6056, rel=0.5) and normal_delta(8, mu) > 1000 * DELTA
    assert normal_delta(claim.epsilon, 2 / 0.60561 * math.sqrt(2)) == pytest.approx(DELTA, rel=1e-2)


def test_arrays_without_dimensions_leave_local_dp_as_training_made_them(audited) -> None:  # type: ignore[no-untyped-def]
    claim = audited(SCALAR).claims["LocalDpMod"]
    assert claim.epsilon is None and claim.falls_short and "without dimensions: scale" in claim.theorem
    app = client(
        [LocalDpMod(1.0, 1.0, 8.0, DELTA)], lambda given: {name: np.asarray(value + 7) for name, value in given.items()}
    )
    sent = {"w": np.zeros(3, np.float32), "scale": np.zeros((), np.float32)}
    reply = app(question(sent), context()).content["arrays"]
    with pytest.raises(ZeroDivisionError):
        client([LocalDpMod(1.0, 1.0, 8.0, DELTA)], dict)(question(sent), context())
    assert reply["scale"].numpy() == 7.0 and not np.isclose(reply["w"].numpy(), 7.0).any()


def test_one_client_moves_a_weighted_mean_far_beyond_the_servers_noise(audited) -> None:  # type: ignore[no-untyped-def]
    """The same noise twice, and in one run client 0 hardly trains: the models differ by 0.91 C."""
    ends = []
    for name, rate in (("trains", "1.0"), ("rests", "(1e-6 if examples == 91 else 1.0)")):
        np.random.set_bit_generator(np.random.MT19937(0))  # from which Flower's noise is drawn
        private = {"private": f"optimizer.param_groups[0]['lr'] *= {rate}", "size": "(91 if partition == 0 else 1)"}
        wrapped = FIXED.format("Server", AVERAGE).replace("num_sampled_clients=4", "num_sampled_clients=10")
        found = audited(UNEVEN | private, wrapped, clients=10, rounds=1, name=name)
        ends.append(found)
    apart = math.sqrt(sum(float(np.square(ends[0].arrays[key] - ends[1].arrays[key]).sum()) for key in ends[0].arrays))
    assert apart == pytest.approx(0.91 * C, rel=1e-4)
    (noise,) = (each.noise for each in ends[0].run.rounds)
    assert noise == pytest.approx(0.1 * C, rel=0.15)  # of 650 numbers: 5 standard errors
    claim = ends[0].claims["DifferentialPrivacyServerSideFixedClipping"]
    assert claim.falls_short and "moves it by 0.91 C against noise of 0.1 C" in claim.notes[0]
    assert normal_delta(claim.epsilon, 9.1) == pytest.approx(DELTA, rel=1e-6)


def test_equal_weights_prove_what_the_multiplier_says(audited) -> None:  # type: ignore[no-untyped-def]
    accounted = FIXED.format("Server", AVERAGE)[:-1] + ", accountant=RdpAccountant(CONFIG))"
    claim = audited({}, accounted, ACCOUNTED).claims["DifferentialPrivacyServerSideFixedClipping"]
    assert normal_delta(claim.epsilon, math.sqrt(2)) == pytest.approx(DELTA, rel=1e-6) and not claim.falls_short
    accountant = dp_accounting.rdp.RdpAccountant().compose(dp_accounting.GaussianDpEvent(1.0), 2)
    assert (
        f"epsilon {accountant.get_epsilon(DELTA):.4g}, delta 1e-05 after 2 releases (add-or-remove-one)" in claim.says
    )


SEED = "import numpy; numpy.random.seed(4)"
ADACLIP = (
    "max_grad_norm=1.0, clipping='adaptive', target_unclipped_quantile=0.5, clipbound_learning_rate=0.2, "
    "max_clipbound=9.0, min_clipbound=0.1, unclipped_num_std=0.6"
)
UNPROVEN = {
    "no mod clips": ({}, FIXED.format("Client", AVERAGE), "", "times as long as the clipping norm: no mod clips them"),
    "no mean": (
        UNEVEN,
        FIXED.format("Server", "FedMedian(fraction_evaluate=0.0)"),
        "",
        "FedMedian does more than average",
    ),
    "own aggregation": (
        {},
        FIXED.format("Server", AVERAGE).replace("DifferentialPrivacyServerSideFixedClipping", "Own"),
        "class Own(DifferentialPrivacyServerSideFixedClipping):\n"
        "    def aggregate_train(self, *given):\n        return super().aggregate_train(*given)",
        "Own has aggregate_train of its own",
    ),
    "replaced method": (
        {},
        FIXED.format("Server", "patched()"),
        "def patched():\n    made = FedAvg(fraction_evaluate=0.0)\n    plain = made.aggregate_train\n"
        "    made.aggregate_train = lambda *given: plain(*given)\n    return made",
        "FedAvg does more than average",
    ),
    "no noise": (
        {},
        FIXED.format("Server", AVERAGE).replace("multiplier=1.0", "multiplier=0.0"),
        "",
        "there is no noise",
    ),
    "seeded server": ({}, FIXED.format("Server", AVERAGE), SEED, "numpy's generator, which draws the noise, is seeded"),
    "seeded client": (LOCAL | {"after": SEED}, AVERAGE, "", "numpy's generator, which draws the noise, is seeded"),
    "seeded engine": (
        OPACUS
        | {
            "private": f"state = torch.get_rng_state()\n    torch.manual_seed(4)\n    {OPACUS['private']}",
            "after": "torch.set_rng_state(state)",
        },
        AVERAGE,
        "",
        "torch's generator, which draws the noise, is seeded",
    ),
    "no dimensions": (SCALE, FIXED.format("Server", AVERAGE), "", "scale has no dimensions, and is not clipped"),
    "half precision": (
        LOCAL | {"parts": "self.half()", "private": "net.float()", "after": "net.half()"},
        AVERAGE,
        "",
        "out.weight has half precision",
    ),
    "other steps": (
        OPACUS | {"after": "torch.optim.Adam([torch.zeros(1, requires_grad=True)]).step()"},
        AVERAGE,
        "",
        "Adam took steps without noise as well",
    ),
    "bare steps": (
        OPACUS | {"after": "optimizer.original_optimizer.step()"},
        AVERAGE,
        "",
        "SGD took steps without noise as well",
    ),
    "own noise": (
        OPACUS
        | {
            "private": f"{OPACUS['private']}\n    optimizer.add_noise = lambda: [setattr(p, 'grad', p.summed_grad)"
            " for p in optimizer.params]"
        },
        AVERAGE,
        "",
        "DPOptimizer has add_noise of its own",
    ),
    "summed batches": (
        OPACUS
        | {
            "private": OPACUS["private"].replace("max_grad", "poisson_sampling=False, max_grad")
            + "\n    import opacus\n    loader = [*opacus.data_loader.DPDataLoader(loader.dataset, sample_rate=0.9)]\n"
            "    images, labels = loader[0]\n    nn.functional.cross_entropy(model(images), labels).backward()\n"
            "    optimizer.zero_grad = lambda: None"
        },
        AVERAGE,
        "",
        "a step adds up the gradients of several Poisson batches",
    ),
    "packed sequences": (
        OPACUS | {"after": "torch.nn.utils.rnn.pack_sequence([torch.ones(1), torch.ones(2)], enforce_sorted=False)"},
        AVERAGE,
        "",
        "Opacus gives sequences that were packed in order of their lengths each other's gradients",
    ),
    "adaptive clipping": (
        OPACUS | {"private": OPACUS["private"].replace("max_grad_norm=1.0", ADACLIP)},
        AVERAGE,
        "",
        "divides a noisy count by the exact size of the batch",
    ),
}


@pytest.mark.parametrize("case", UNPROVEN)
def test_where_no_theorem_holds_nothing_is_proven(case: str, audited, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Neither by the audit nor in the tap's ledger, and no array is covered."""
    client, strategy, imports, why = UNPROVEN[case]
    audit = audited(client, strategy, imports, rounds=1, clients=4 if "Client" in strategy else 2).audit
    (claim,) = audit.claims
    assert claim.epsilon is None and why in claim.theorem
    lines = [json.loads(path.read_text()) for path in (tmp_path / "a" / "out" / "tap-1" / "ledger").iterdir()]
    assert all(line["epsilon"] is None and why in line["theorem"]["epsilon"] for line in lines)
    assert "covered" not in {each.verdict for each in audit.leaving} and bool(lines) is (strategy == AVERAGE)
    assert case != "no mean" or not any("of a round's mean" in note or "weights" in note for note in claim.notes)


@pytest.mark.parametrize("side", ["Server", "Client"])
def test_adaptive_noise_is_for_the_next_norm(side: str, audited) -> None:  # type: ignore[no-untyped-def]
    """The figure is that of each round's own clipping norm, and of the count; the multiplier's is below it.

    The norm's direction is seen unless the noise of the count hides it in both rounds: 2e-7.
    """
    mod = {"imports": "from flwr.clientapp.mod import adaptiveclipping_mod", "mods": "adaptiveclipping_mod"}
    found = audited(mod if side == "Client" else {}, ADAPTIVE.format(side))
    claim = found.claims[f"DifferentialPrivacy{side}SideAdaptiveClipping"]
    own = (1.0**-2 - (2 * 0.6) ** -2) ** -0.5
    squares = sum((each.clip_norm / (own * each.next_clip_norm)) ** 2 + (1 / 0.6) ** 2 for each in found.run.rounds)
    assert normal_delta(claim.epsilon, math.sqrt(squares)) == pytest.approx(DELTA, rel=1e-6)
    assert any("noise is for the next one's" in note for note in claim.notes)
    assert any("moves away from its target" in note for note in claim.notes)


def test_engines_made_anew_tell_of_one_round(audited) -> None:  # type: ignore[no-untyped-def]
    """The app asks a new engine each round; all its steps together are composed here by another library."""
    found = audited(OPACUS, rounds=3, clients=2)
    claim = found.claims["Opacus"]
    told = {answer.replied["metrics"]["epsilon"] for answer in found.answers}
    assert len(told) == 1 and claim.says.startswith(f"epsilon {told.pop():.4g}") and claim.falls_short
    event = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(1.1))
    truth = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE).compose(event, 6)
    assert claim.releases == 6 and claim.epsilon == pytest.approx(truth.get_epsilon(DELTA), rel=5e-3)
    assert {each.name: each.cover for each in found.audit.leaving}["arrays"] == "Opacus"


def test_batches_that_are_not_drawn_amplify_nothing(audited, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A step of two in each of two rounds: both may use the same example, and the tap's ledger says the same."""
    private = OPACUS["private"].replace("max_grad", "poisson_sampling=False, max_grad")
    shuffled = OPACUS | {"private": f"{private}\n    from itertools import islice\n    loader = islice(loader, 1)"}
    found = audited(shuffled, rounds=2, clients=2)
    claim, folder = found.claims["Opacus"], tmp_path / "a" / "out" / "tap-1" / "ledger"
    assert normal_delta(claim.epsilon, 2 / 1.1 * math.sqrt(2)) == pytest.approx(DELTA, rel=1e-6)
    assert any("not drawn by Poisson sampling" in note for note in claim.notes) and "replace-one" in claim.adjacency
    line = json.loads((folder / "0001-0000.json").read_text())
    assert line["epsilon"] == pytest.approx(claim.once) and "replace-one" in line["adjacency"]


def test_the_rate_is_at_least_the_samplers(audited, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Steps on another loader than the engine was given, of 9 in 10 examples and not of half; with torch.func."""
    private = OPACUS["private"].replace("max_grad", 'grad_sample_mode="functorch", max_grad')
    loader = "import opacus\n    loader = opacus.data_loader.DPDataLoader(loader.dataset, sample_rate=0.9)"
    claim = audited(OPACUS | {"private": f"{private}\n    {loader}"}, rounds=1, clients=2).claims["Opacus"]
    event = dp_accounting.PoissonSampledDpEvent(0.9, dp_accounting.GaussianDpEvent(1.1))
    truth = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE).compose(event)
    assert claim.releases == 1 and claim.epsilon == pytest.approx(truth.get_epsilon(DELTA), rel=5e-3)
    line = json.loads((tmp_path / "a" / "out" / "tap-1" / "ledger" / "0001-0000.json").read_text())
    assert line["epsilon"] >= claim.epsilon


def test_uses_of_an_example_follow_from_passes_over_loaders() -> None:
    data, drawn = TensorDataset(torch.zeros(8)), Drawn()
    with hearing_loaders(drawn):
        for _ in range(3):
            for _ in DataLoader(data, batch_size=2, shuffle=True):
                drawn.stepped()
    assert (drawn.poisson, drawn.uses(12), drawn.uses(2), Drawn().uses(12)) == (False, 3, 2, 12)
    assert drawn.uses(13) == 13  # of a step that was not seen nothing is known
    with hearing_loaders(drawn):
        list(DataLoader(data, batch_size=2, sampler=RandomSampler(data, replacement=True)))
    assert drawn.uses(12) == 12


@pytest.mark.parametrize("poisson", [True, False])
def test_batches_that_are_kept_are_used_again(poisson: bool) -> None:
    """Three epochs over a list, as of itertools.cycle: one pass, and no new Poisson batches."""
    loader: Any = DataLoader(TensorDataset(torch.zeros(8)), batch_size=2)
    fresh, kept = Drawn(), Drawn()
    for drawn, batches in ((fresh, loader), (kept, [])):
        with hearing_loaders(drawn):
            for _ in batches or 3 * list(DPDataLoader.from_data_loader(loader) if poisson else loader):
                drawn.stepped()
    assert (fresh.poisson, fresh.uses(4), kept.poisson, kept.uses(12)) == (False, 1, False, 12)
    with hearing_loaders(drawn := Drawn()):
        for _ in DPDataLoader.from_data_loader(loader):
            drawn.stepped()
    assert drawn.poisson and drawn.uses(4) == 4
    with hearing_loaders(drawn := Drawn()):  # whoever knows the generator knows who is in which batch
        for _ in DPDataLoader.from_data_loader(loader, generator=torch.Generator()):
            drawn.stepped()
    assert not drawn.poisson and drawn.uses(4) == 4


def test_a_strategy_that_flower_has_replaced_proves_nothing() -> None:
    (claim,) = claims([], (StrategyLayer(DPFedAvgFixed.__name__, DPFedAvgFixed.__module__),), (), Path())
    assert (claim.what, claim.epsilon) == ("DPFedAvgFixed", None) and "have replaced it" in claim.theorem


@pytest.mark.parametrize("masked", [False, True])
def test_a_wrapper_proves_nothing_of_means_that_are_rounded(masked: bool) -> None:
    """With SecAgg+, whose steps are far above those of float32; nor does the server see any upload then."""
    settings = {"noise_multiplier": 1.0, "clipping_norm": C, "num_sampled_clients": 2.0}
    wrapper = "DifferentialPrivacyClientSideFixedClipping"
    layers = (StrategyLayer(wrapper, "", settings, wraps=wrapper), StrategyLayer("FedAvg", "", averages=True))
    rounds = (Round(1, {1: 8.0, 2: 8.0}, {1: C, 2: C}, clip_norm=C, next_clip_norm=C, noise=C / 2),)
    acted = (ModAction("fixedclipping_mod", norm=2 * C, left=C),)
    replied = {"secaggplus_configs": {"masked_parameters": ["9 bytes"]}}
    stage = "collect_masked_vectors" if masked else None
    answers = [Answer(k, k, "train", stage, replied=replied, actions=acted) for k in (1, 2)]
    clipped, found = claims(answers, layers, rounds, Path())
    assert (found.epsilon is None) is masked is ("SecAgg+ rounds each upload" in found.theorem)
    assert ("the sum has clipped updates" if masked else "the server sees each clipped update") in clipped.theorem


def test_poisson_batches_beside_others_prove_zero_out_alone() -> None:
    """Each pair of laws is composed by another library: five Poisson steps, and one whole step under replace-one."""
    poisson = {"sampling": "poisson", "rate": 0.1, "participations": 5, "adjacency": "zero-out"}
    noises = tuple(observed_noise("Opacus", 1.0, DELTA, 1.0, **kind) for kind in (poisson, {"sampling": "fixed"}))
    (claim,) = claims([Answer(0, 0, "train", noises=noises)], (), (), Path())
    truth = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    truth.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0)), 5)
    truth.compose(dp_accounting.GaussianDpEvent(0.5))
    assert claim.epsilon == pytest.approx(truth.get_epsilon(DELTA), rel=5e-3)
    assert claim.adjacency.startswith("zero-out") and claim.releases == 6


def protected(tmp_path: Path) -> str:
    text = (
        f'[mechanism]\nname = "gaussian"\nsigma = 4.0\nclip_norm = 0.1\n[privatise]\nfolder = "{tmp_path / "real"}"\n'
    )
    return str(settings(tmp_path, text))


ORDERS = {
    "privatise outside": (
        "privatise({!r}), LocalDpMod(1.0, 1.0, 8.0, 1e-5)",
        "privatise acts on what LocalDpMod has noised",
    ),
    "privatise inside": (
        "LocalDpMod(1.0, 1.0, 8.0, 1e-5), privatise({!r})",
        "LocalDpMod acts on what privatise has noised",
    ),
    "clipped": ("short, privatise({!r})", "short clips what privatise has noised"),
    "tapped": ("tap({!r}), privatise({!r})", ""),
    "tapped inside": ("privatise({!r}), tap({!r})", ""),
}


@pytest.mark.parametrize("case", ORDERS)
def test_mods_in_every_order_are_claimed_once(case: str, audited, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """And the client's own ledger stays as it is."""
    mods, said = ORDERS[case]
    short = (
        "from flwr.clientapp.mod import LocalDpMod\nfrom fedpriv.flower import privatise, tap\n"
        "def short(message, context, call_next):\n"
        "    reply = call_next(message, context)\n"
        '    start = message.content["arrays"].to_torch_state_dict()\n'
        '    after = reply.content["arrays"].to_torch_state_dict()\n'
        "    after = {key: start[key] + 0.1 * (value - start[key]) for key, value in after.items()}\n"
        '    reply.content["arrays"] = ArrayRecord(after)\n'
        "    return reply"
    )
    path = protected(tmp_path)
    found = audited({"imports": short, "mods": mods.format(path, path)}, clients=2)
    assert [claim.what for claim in found.audit.claims].count("privatise") == 1
    assert len(found.audit.claims) == (2 if "LocalDpMod" in mods else 1)
    assert found.claims["privatise"].releases == 2 and not (tmp_path / "real").exists()
    assert [text for text in found.audit.warnings if said and said in text] == list(found.audit.warnings)
    assert bool(said) is bool(found.audit.warnings)
    assert {each.verdict for each in found.audit.leaving if each.name == "arrays"} == {"covered"}


def test_what_a_mod_around_privatise_adds_is_not_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Privatise knows nothing of it: arrays, a number in a record of its own, and one in the place of a constant."""
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))

    def adding(message: Message, home: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, home)
        reply.content["raw"] = record({"x": np.ones(5, np.float32)})
        reply.content["more"] = MetricRecord({"accuracy": 0.5})
        reply.content.metric_records["metrics"]["num-examples"] = 77
        return reply

    rows = {}
    for mods in ([], [adding]):
        out = tmp_path / str(len(mods))
        with observing_mods(out, TapSettings(), out):
            app = client([*mods, privatise(protected(tmp_path))], lambda given: {"w": given["w"] + 1})
            ObservedApp(app, out)(question({"w": np.zeros((4, 16), np.float32)}), context())
        rows[len(mods)] = {each.name: each.verdict for each in leaving(read_answers(out))}
    assert rows[0].pop("arrays") == rows[1].pop("arrays") == "covered"
    assert rows[0]["metrics.num-examples"] == "covered"
    assert rows[1] == rows[0] | {"raw": "raw data", "more.accuracy": "uncovered", "metrics.num-examples": "uncovered"}


def test_a_wrapper_is_found_wherever_a_strategy_keeps_it(audited) -> None:  # type: ignore[no-untyped-def]
    """A strategy of the app's own around it, by composition or under another name."""
    kept = (
        "class Kept(Strategy):\n    def __init__(self, inside):\n        self.{0} = inside\n"
        "    def summary(self):\n        pass\n"
        "    configure_train = lambda self, *given: self.{0}.configure_train(*given)\n"
        "    aggregate_train = lambda self, *given: self.{0}.aggregate_train(*given)\n"
        "    configure_evaluate = lambda self, *given: self.{0}.configure_evaluate(*given)\n"
        "    aggregate_evaluate = lambda self, *given: self.{0}.aggregate_evaluate(*given)"
    )
    for name in ("strategy", "inside"):
        found = audited({}, f"Kept({FIXED.format('Server', AVERAGE)})", kept.format(name), rounds=1, name=name)
        assert [layer.name for layer in found.run.layers][::2] == ["Kept", "FedAvg"]
        (claim,) = found.audit.claims
        assert normal_delta(claim.epsilon, 1.0) == pytest.approx(DELTA, rel=1e-6)
        assert found.run.rounds[0].noise == pytest.approx(0.25 * C, rel=0.15)
        assert any("Kept is around it" in note for note in claim.notes)


def test_a_mod_given_twice_is_refused(tmp_path: Path) -> None:
    def own(message, context, call_next):  # type: ignore[no-untyped-def]
        return call_next(message, context)

    again = LocalDpMod(1.0, 1.0, 8.0, DELTA), LocalDpMod(1.0, 1.0, 4.0, DELTA)
    for mods in (again, (fixedclipping_mod, own, fixedclipping_mod), (own, own), (tap(tmp_path), tap(tmp_path))):
        with (
            observing_mods(tmp_path, TapSettings(), tmp_path),
            pytest.raises(InputError, match="given twice; allowed is once"),
        ):
            client(list(mods), dict)


def test_strategies_that_cannot_be_read_are_refused() -> None:
    class Missing(FedAvg):
        strategy = object()

    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as Wrapper

    wrapper = Wrapper(FedAvg(), 1.0, 0.5, 2)
    wrapper.noise_multiplier = None  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"noise_multiplier = None: it cannot be read"):
        ServerNotes()._read(wrapper)
    with pytest.raises(InputError, match=r"strategy = 'object': it cannot be read: it is none of Flower's"):
        ServerNotes()._read(Missing())


def test_methods_of_strategies_are_as_before_afterwards() -> None:
    before = dict(vars(FedAvg))
    with observing_strategies():
        assert FedAvg.aggregate_train is not before["aggregate_train"]
    assert dict(vars(FedAvg)) == before and "__init_subclass__" not in vars(FedAvg.__mro__[1])


def test_strategies_of_older_apps_are_observed_as_well() -> None:
    """Weights, norms, clipping norm and the noise that is added, of Flower's strategies on parameters."""
    values = {node: np.full((50, 20), 0.01 * node, np.float32) for node in (1, 2)}
    results = [
        (SimpleNamespace(node_id=node), FitRes(OK, ndarrays_to_parameters([value]), 10 * node, {}))
        for node, value in values.items()
    ]
    manager = SimpleNamespace(num_available=lambda: 2, sample=lambda **_: [])
    with observing_strategies() as notes:
        wrapper = LegacyWrapper(LegacyFedAvg(), 1.0, 0.5, 2)
        wrapper.configure_fit(1, ndarrays_to_parameters([np.zeros((50, 20), np.float32)]), manager)  # type: ignore[arg-type]
        wrapper.aggregate_fit(1, results, [])  # type: ignore[arg-type]
    (each,) = notes.rounds
    assert [layer.name for layer in notes.layers] == [LegacyWrapper.__name__, "FedAvg"] and notes.layers[1].averages
    assert each.weights == {1: 10.0, 2: 20.0} and each.clip_norm == 0.5
    assert each.norms == pytest.approx({node: float(np.linalg.norm(value)) for node, value in values.items()})
    assert each.noise == pytest.approx(0.25, rel=0.12)  # of 1,000 numbers: 5 standard errors


def test_what_a_strategy_has_of_encrypted_arrays_are_the_others() -> None:
    values = [np.array(b"encrypted"), np.ones(2, np.float32)]
    for arrays in (ArrayRecord(values), ndarrays_to_parameters(values)):
        assert {name: value.tolist() for name, value in _of_server(arrays).items()} == {"1": [1.0, 1.0]}


LEFT = {
    "update": (
        Answer(0, 1, "train", sent={"a": {"w": "float32 (2,)"}}, replied={"b": {"w": "float32 (2,)"}}),
        "uncovered",
    ),
    "some layers": (
        Answer(
            0, 1, "train", sent={"a": {"w": "float32 (2,)", "v": "float32 (3,)"}}, replied={"a": {"w": "half (2,)"}}
        ),
        "uncovered",
    ),
    "a narrower network": (
        Answer(0, 1, "train", sent={"a": {"w": "float32 (8, 4)"}}, replied={"a": {"w": "float32 (2, 4)"}}),
        "uncovered",
    ),
    "embeddings without names": (
        Answer(0, 1, "train", sent={"a": {"0": "float32 (99, 4)"}}, replied={"a": {"0": "float32 (9, 4)"}}),
        "raw data",
    ),
    "values": (Answer(0, 1, "query.times", sent={}, replied={"s": {"t": "float64 (3,)"}}), "raw data"),
    "embeddings": (
        Answer(0, 1, "train", sent={"a": {"w": "float32 (2,)"}}, replied={"e": {"0": "float32 (9, 4)"}}),
        "raw data",
    ),
    "first parameters": (
        Answer(0, 1, "get_parameters", sent={}, replied={"getparametersres.parameters": {"0": "float32 (2,)"}}),
        "uncovered",
    ),
    "trees": (Answer(0, 1, "train", sent={}, replied={"m": {"0": "uint8 (99,)"}}), "raw data"),
    "bytes": (Answer(0, 1, "train", sent={}, replied={"m": {"tree": "99 bytes"}}), "raw data"),
    "list": (Answer(0, 1, "query", sent={}, replied={"m": {"ages": [4, 5]}}), "raw data"),
    "echo": (Answer(0, 1, "evaluate", sent={}, replied={"a": {"w": "float32 (2,)"}}, echoed=("a",)), "constant"),
    "setting": (Answer(0, 1, "train", sent={"c": {"lr": 0.1}}, replied={"m": {"lr": 0.1}}), "constant"),
    "count": (Answer(0, 1, "train", replied={"m": {"num-examples": 4}}), "uncovered"),
    "masked": (Answer(0, 1, "train", "collect", replied={"secaggplus_configs": {"masked": [1, 2]}}), "masked"),
    "unknown mod": (
        Answer(
            0,
            1,
            "train",
            sent={"a": {"w": "float32 (2,)"}},
            replied={"a": {"w": "float32 (2,)"}},
            actions=(ModAction("mine", noised=("w",), norm=1.0, left=1.0),),
        ),
        "uncovered",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_leaves_is_named_for_what_it_is(case: str) -> None:
    answer, verdict = LEFT[case]
    assert [each.verdict for each in leaving([answer])] == [verdict]


def test_a_number_that_clients_have_in_common_may_be_of_their_data() -> None:
    """Simulated clients often have equally many examples; what Flower's own records say of success is constant."""
    replied = {"info": {"n": 16}, "fitres.status": {"code": 0}}
    rows = leaving([Answer(client, client, "train", replied=replied) for client in (1, 2)])
    assert {row.name: row.verdict for row in rows} == {"info.n": "uncovered", "fitres.status.code": "constant"}


def test_mods_that_fail_to_evaluate_are_for_training_alone(tmp_path: Path) -> None:
    """Flower's own mod, given to the whole app, whose error blames the server's wrapper."""
    asked = question({"w": np.zeros(2)}, "evaluate")
    reply = ObservedApp(client([fixedclipping_mod], dict), tmp_path)(asked, context(0))
    assert reply.has_error() and reply.metadata.dst_node_id == asked.metadata.src_node_id
    ObservedApp(client([], dict), tmp_path)(question({"w": np.zeros(2)}), context(1))
    run = Simulated(mods=("fixedclipping_mod",))
    said = summed_up("digits", run, read_answers(tmp_path), None, tmp_path).warnings
    assert any("1 of 2 messages failed (1 to evaluate)" in text for text in said)
    assert "fixedclipping_mod fails on messages other than train: give it to that alone, @app.train(mods=[...])" in said
    asked_twice = [Answer(0, 1, "query", replied={"m": {"mean": value}}) for value in (1.5, 2.5)]
    audit = summed_up("digits", Simulated(), asked_twice, None, tmp_path)
    assert (audit.rounds, audit.leaving[0].why) == (2, "it may be computed from data")


def test_what_is_said_of_one_answer_is_judged_by_one(tmp_path: Path) -> None:
    """With a sensitivity of twice the clipping norm LocalDpMod keeps what it says, and says nothing of two answers."""
    own = replace(_of_local(LocalDpMod(1.0, 2.0, 0.9, DELTA), {}, {}), doubt="")
    answer = Answer(0, 1, "train", actions=(ModAction("LocalDpMod", norm=1.0, left=1.0),), noises=(own,))
    (claim,) = claims([answer, answer], (), (), tmp_path)
    mu = 0.9 / math.sqrt(2 * math.log(1.25 / DELTA))
    assert normal_delta(claim.once, mu) == pytest.approx(DELTA, rel=1e-6)
    assert claim.once < 0.9 < claim.epsilon and not claim.falls_short
    less = replace(_of_local(LocalDpMod(1.0, 1.0, 0.9, DELTA), {}, {}), doubt="")  # in a later round
    (claim,) = claims([answer, replace(answer, noises=(less,))], (), (), tmp_path)
    assert normal_delta(claim.once, 2 * mu) == pytest.approx(DELTA, rel=1e-6) and claim.falls_short


def test_attacked_is_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, where the first client to be asked was asked to evaluate."""
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))
    app, trees = client([tap(tmp_path / "app.py")], lambda _: {"0": np.ones(9, np.uint8)}), {"0": np.zeros(9, np.uint8)}
    app(question(trees, "evaluate"), context(0))
    app(question(trees), context(1))
    found = _attacked(tmp_path, ((), ()), Silent())
    assert found is not None and any("train of round 1, client 1: leaves" in text for text in found.verdict)


def test_clients_that_fail_are_the_apps_own_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: object) -> dict[str, np.ndarray]:
        raise ValueError("no data\nhere")

    app = ObservedApp(client([], failing), tmp_path)
    with pytest.raises(InputError, match="its server asked no client"):
        read_answers(tmp_path)
    with pytest.raises(ValueError, match="no data"):
        app(question({"w": np.zeros(2, np.float32)}), context())
    with pytest.raises(
        InputError, match="the app's copy fails: each client fails, the first with: ValueError: no data here"
    ):
        read_answers(tmp_path)
    said = "the app's copy fails: KeyError: '0', after a client's ValueError: no data here; its output is in"
    assert said in _failed(tmp_path, "KeyError: '0'")  # of a server that goes on with nothing


def test_a_folder_without_an_app_is_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        done = CliRunner().invoke(command_line, ["flower", "audit", str(folder)])
        assert isinstance(done.exception, InputError) and "\n" not in str(done.exception)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    done = CliRunner().invoke(command_line, ["flower", "audit", str(tmp_path)])
    assert "no Flower app" in str(done.exception)


def test_without_out_a_folder_is_made_and_goes_if_the_audit_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Path]()

    def run(_: Path, out: Path, *__: Any) -> None:
        (out / "simulation.log").write_text("half")
        asked.append(out)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedpriv.flower.audit.audit.simulate", run)
    monkeypatch.chdir(tmp_path)
    write_app(tmp_path / "app", {})
    CliRunner().invoke(command_line, ["flower", "audit", "app"])
    assert [out.parent for out in asked] == [tmp_path / "runs"] and not (tmp_path / "runs").exists()
    done = CliRunner().invoke(command_line, ["flower", "audit", "app", "--out", "app"])
    assert "it is there already" in str(done.exception) and len(asked) == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--attack", "igaa"), "attack 'igaa' is not known; did you mean iga?"),
        (("--set", "adversary.iga.iteration=3"), "iga has no setting 'iteration'; did you mean iterations?"),
        (("--run-config", "rounds"), "allowed are keys and values"),
    ],
)
def test_what_is_wrong_is_told_before_the_simulation(
    given: tuple[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_app(tmp_path / "app", {})
    done = CliRunner().invoke(command_line, ["flower", "audit", "app", *given])
    assert isinstance(done.exception, InputError) and told in str(done.exception)
    assert not (tmp_path / "runs").exists()


def test_what_is_wrong_with_a_copy_is_told_of_the_app(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app", {})
    with pytest.raises(InputError) as raised, copied(app) as copy:
        (copy / "fedpriv.toml").write_text("[tap]\nrounds = 0\n")
        read_settings(copy / "fedpriv.toml")
    assert str(raised.value).startswith(f"{app}/fedpriv.toml: tap.rounds = 0: ")


def test_what_a_simulation_started_ends_with_it() -> None:
    """Whoever holds a pipe's other end is gone when it is at its end."""
    heard, held = os.pipe()
    assert _run_in_group(["sh", "-c", "sleep 600 & exit 3"], stdout=held) == 3
    os.close(held)
    assert select([heard], [], [], 30)[0] == [heard] and os.read(heard, 1) == b""
    os.close(heard)


def hashes(folder: Path) -> dict[str, str]:
    """Of each file in a folder, by its path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_the_command_on_flowers_own_simulation(tmp_path: Path) -> None:
    """No file of the app is touched, though it writes into the folder that it is run in."""
    writes = LOCAL | {"after": "open('weights.txt', 'w').write('x')"}
    app = write_app(tmp_path / "app", writes, FIXED.format("Server", AVERAGE).replace("clients=4", "clients=2"))
    before = hashes(app)
    done = fedpriv("flower", "audit", str(app), "--out", str(tmp_path / "out"), "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert hashes(app) == before
    said = " ".join(done.stdout.split())
    assert "LocalDpMod, against the server and all who read uploads; replace-one" in said
    assert "2 releases as one of mu = 1.414" in said and "against the server nothing is proven" in said
    page = (tmp_path / "out" / "report.html").read_text()
    assert "less than it says" in page and "Originals above" in page
    found = json.loads((tmp_path / "out" / "audit.json").read_text())
    found["pictures"].append("tap-1/reconstructions/0001-0000-tabular.safetensors")  # as of an app on rows or texts
    (tmp_path / "out" / "audit.json").write_text(json.dumps(found))
    assert write_audit_report(tmp_path / "out").read_text() == page
    refused = CliRunner().invoke(command_line, ["report", str(tmp_path / "out")])
    assert "it has no config.toml; the command that made it wrote its report.html" in str(refused.exception)


def test_what_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    """A run config that Flower does not read, an app that is imported from elsewhere, settings, a project of no app."""
    for text in ("rounds", "rounds=", "=2"):
        with pytest.raises(InputError, match="--run-config"):
            _overridden(text)
    with pytest.raises(InputError, match=r"json:loads is imported from .*, which is not in the app's folder"):
        _loaded("json:loads", tmp_path)
    write_app(tmp_path / "app", {})
    (tmp_path / "app" / "fedpriv.toml").write_text("[tap]\nrounds = 0\n")
    told = observe(tmp_path / "app", tmp_path, 2, "")
    assert "tap.rounds = 0" in told.problem and not told.by_app
    (tmp_path / "app" / "fedpriv.toml").write_text("")
    (tmp_path / "app" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    told = observe(tmp_path / "app", tmp_path, 2, "")
    assert "Invalid pyproject.toml" in told.problem and told.by_app


def test_an_app_that_raises_in_its_run_fails_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**given: Any) -> None:
        given["server_app"](InlineGrid(given["client_app"], 2), given["server_app_context"])

    monkeypatch.setattr(import_module("flwr.simulation.run_simulation"), "_run_simulation", run)
    app = write_app(tmp_path / "app", {"imports": SEED}, "1 / 0")
    np.random.set_bit_generator(np.random.MT19937())
    with importable(app, monkeypatch):
        assert _loaded_apart("digits.client_app:app", app) is not None and not numpy_is_seeded()
        told = observe(app, tmp_path / "out", 2, "")
    assert (told.problem, told.by_app) == ("ZeroDivisionError: division by zero", True)


@pytest.mark.slow
def test_an_app_that_fails_by_itself_is_one_line(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app", {"imports": "1 / 0"})
    done = fedpriv("flower", "audit", str(app), "--out", str(tmp_path / "out"), "--quiet", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the app's copy fails: ZeroDivisionError: division by zero" in done.stderr
