"""The endpoint of a finished run: made once, fixed from then on, and its figures in the folder."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

import fedpriv.service.opening as lab_service
from fedpriv.core.errors import InputError
from fedpriv.core.progress import Silent
from fedpriv.core.report import load_view
from fedpriv.core.report.filters import fragment
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.models.machinery.convex import Objective, minimised
from fedpriv.service.answer_sources import pooled_features, refuse_unsolvable_head
from fedpriv.service.endpoint import checked_images
from fedpriv.service.opening import add_user, in_process, open_service
from fedpriv.service.policies import HeadKeys, opendp
from fedpriv.service.proof import head_sensitivity
from fedpriv.service.records import Service, answered, made_service, users
from fedpriv.service.report import ServedFinding
from fedpriv.service.settings import ServiceConfig
from tests.cases import in_one_test
from tests.integration.small import copied, finished

BARE: dict[str, dict[str, object]] = {
    "federation": {"clients": 2, "rounds": 1},
    "adversary": {"attacks": []},
    "mechanism": {"name": "none"},
}
QUICK = {"features": "pooled:4", "regularisation": 0.01, "tolerance": 1e-6}


def config(method: str, **keys: object) -> ServiceConfig:
    return ServiceConfig.model_validate({"method": method, **keys})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finished(tmp_path_factory.mktemp("service") / "run", **BARE)


def test_the_noisy_model_is_written_once_and_never_without_noise(run: RunFolder, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    wanted = config("model", target_epsilon=2.0, **QUICK)
    served = open_service(folder, wanted, Silent())
    world = build_world(folder.experiment())
    answers = served.ask(world.dataset.x_test[:20])
    service = folder.read(Service)
    assert service is not None and service.head is not None
    found = service.head
    examples = sum(len(rows) for rows in world.partitions)
    assert (found.examples, found.features, found.norm) == (examples, 16, 1.0)
    assert found.sensitivity == head_sensitivity(1.0, 0.01, examples, 1e-6)
    assert service.guarantee.epsilon == pytest.approx(2.0, rel=1e-6) and service.guarantee.participations == 1
    weights = load_file(folder.path / "service" / "model.safetensors")["weights"]
    features = pooled_features(world.dataset.x_test[:20].double().numpy() / 255, 4, 1.0)
    np.testing.assert_array_equal(answers.labels, (features @ weights.T).argmax(axis=1))
    rows = np.sort(np.concatenate(world.partitions))
    trained = pooled_features(world.dataset.x_train[torch.from_numpy(rows)].double().numpy() / 255, 4, 1.0)
    exact = minimised(Objective(trained, world.dataset.y_train.numpy()[rows], 10, 0.01), 1.0, 1e-6).weights
    # 160 normal numbers of this deviation: within a factor of 1.3 but once in 1e5.
    assert service.scale / 1.3 < float((weights - exact).std()) < 1.3 * service.scale
    before = {path.name: path.read_bytes() for path in (folder.path / "service").iterdir()}
    again = open_service(folder, None, Silent())
    assert again.ask(world.dataset.x_test[:20]).labels.tolist() == answers.labels.tolist() and again.asked == 20
    assert {path.name: path.read_bytes() for path in (folder.path / "service").iterdir()} == before


def test_another_policy_or_model_is_refused(run: RunFolder, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    open_service(folder, config("rounded:2", answers=3), Silent())
    open_service(folder, config("rounded:2", answers=3), Silent())
    with pytest.raises(InputError, match="answers by rounded:2 already, and its query ledger is for that alone"):
        open_service(folder, config("none"), Silent())
    path = folder.path / "service" / "service.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "answers": 1000}))
    with pytest.raises(InputError, match=r"charges.jsonl is of another endpoint, or of another budget \(3 answers\)"):
        open_service(folder, None, Silent())
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": "00"}))
    with pytest.raises(InputError, match="is of another model than the run's"):
        open_service(folder, None, Silent())


@in_one_test(
    "wanted",
    [
        config("model", target_epsilon=2.0, features="pooled:4", regularisation=1e-9),
        config("votes", target_epsilon=2.0, features="pooled:4", shards=4, regularisation=1e-9),
        config("model", target_epsilon=2.0, features="pooled:4", tolerance=1e-4, feature_norm=1e3, regularisation=1.0),
        config("label", target_epsilon=2.0, features="pooled:4", regularisation=1.0, tolerance=1e-12),
    ],
)
def test_a_head_that_might_not_be_solved_is_refused_whatever_the_data(wanted: ServiceConfig, run: RunFolder) -> None:
    """Nothing is written, and the value that is named instead is enough."""
    with TemporaryDirectory() as place:
        folder = copied(run, Path(place) / "run")
        with pytest.raises(InputError, match=r"^service\.(tolerance|regularisation) = .*; set service\.") as refusal:
            open_service(folder, wanted, Silent())
        assert not (folder.path / "service" / "service.json").exists()
        key, value = re.findall(r"set service\.(\w+) to (\S+) or more", str(refusal.value))[0]
        policy = wanted.model_copy(update={key: float(value)}).policy
        assert isinstance(policy, HeadKeys)
        refuse_unsolvable_head(policy, 359, 16, 10)  # of the shards, too


def test_the_budget_outlives_the_process(run: RunFolder, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    images = build_world(folder.experiment()).dataset.x_test
    open_service(folder, config("label", answers=100, noise=1.0, **QUICK), Silent()).ask(images[:100])
    with pytest.raises(InputError, match="answers asked for: 1; left: 0 of 100"):
        open_service(folder, None, Silent()).ask(images[100:101])
    assert answered(folder.path) == {"owner": 100}
    with (folder.path / "service" / "charges.jsonl").open("ab") as file:
        file.write(b'{"number": 7, "us')
    assert answered(folder.path) == {"owner": 100, "": 1}
    assert open_service(folder, None, Silent()).asked == 101
    found = ServedFinding().read(folder)
    assert found is not None
    page = fragment(ServedFinding, ServedFinding().section(found, load_view(folder.path)).values)
    assert "<dt>Answers used</dt><dd>101 of 100: lines that were cut off 1, owner 100</dd>" in page


def test_policies_that_a_run_cannot_have_are_refused(run: RunFolder, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    for wanted, said in (
        (config("post-processing"), "its ledger proves nothing"),
        (config("label", noise=1.0, features="pooled:3"), "no multiple of it"),
        (config("paper"), "formulas are for networks with one hidden layer|nothing"),
    ):
        if wanted.method == "paper" and len(getattr(folder.experiment().model, "hidden", ())) == 1:
            continue
        with pytest.raises(InputError, match=said):
            open_service(folder, wanted, Silent())
        assert folder.read(Service) is None


def test_users_have_keys_that_are_kept_nowhere(run: RunFolder, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    with pytest.raises(InputError, match="has no endpoint yet"):
        add_user(folder, "ann", 3)
    open_service(folder, config("none"), Silent())
    key = add_user(folder, "ann", 3)
    assert [user.name for user in users(folder.path)] == ["ann"]
    content = (folder.path / "service" / "users.json").read_text()
    assert key not in content and (folder.path / "service" / "users.json").stat().st_mode & 0o77 == 0
    for name, answers in (("ann", 3), ("owner", 3), ("a b", 3), ("bob", 0)):
        with pytest.raises(InputError, match=f"{name}"):
            add_user(folder, name, answers)
    assert open_service(folder, None, Silent()).ledger.limits == {"ann": 3}


def test_an_endpoint_in_this_process_charges_nothing_and_has_other_noise(run: RunFolder, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    wanted = config("logits", target_epsilon=5.0, **QUICK)
    images = build_world(folder.experiment()).dataset.x_test[:5]
    served = open_service(folder, wanted, Silent()).ask(images)
    endpoint = in_process(folder, build_world(folder.experiment()), wanted)
    aside = endpoint.ask(images)
    assert served.probabilities is not None and aside.probabilities is not None
    assert not np.isclose(served.probabilities, aside.probabilities).all(axis=1).any()
    assert open_service(folder, None, Silent()).asked == 5


def test_noise_is_of_number_question_and_settings(run: RunFolder, tmp_path: Path) -> None:
    """With one noise at two questions, or at two scales, differences of answers would be exact."""
    images = build_world(run.experiment()).dataset.x_test[:20]
    logits: list[NDArray[np.float64]] = []
    for name, epsilon, asked in (("one", 1.0, images[:10]), ("two", 1.0, images[10:]), ("three", 2.0, images[:10])):
        folder = copied(run, tmp_path / name)
        served = open_service(folder, config("logits", target_epsilon=epsilon, **QUICK), Silent())
        scores = served.oracle.scores(checked_images(asked, served.oracle.shape))
        noise = np.log(served.ask(asked).probabilities) - scores
        logits.append((noise - noise.mean(axis=1, keepdims=True)) / served.oracle.scale)
    # Correlations of 100 independent normal numbers: beyond 0.5 but once in 1e6.
    assert all(abs(np.corrcoef(logits[0].ravel(), other.ravel())[0, 1]) < 0.5 for other in logits[1:])


def test_two_that_make_an_endpoint_wait_for_each_other(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one begins when the first has written its model, and has half a second to write its own."""
    folder = copied(run, tmp_path / "run")
    measure, others = lab_service._referee, []

    def slow(*args: Any) -> Any:
        if not others:
            others.append(pool.submit(open_service, folder, config("none"), Silent()))
            wait(others, timeout=0.5)
        return measure(*args)

    monkeypatch.setattr(lab_service, "_referee", slow)
    with ThreadPoolExecutor(1) as pool:
        open_service(folder, config("model", target_epsilon=2.0, **QUICK), Silent())
        with pytest.raises(InputError, match="answers by model already"):
            others[0].result()
    assert made_service(folder.path).method == "model"


def test_reproducible_noise_is_said_where_an_epsilon_is(run: RunFolder, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    open_service(folder, config("model", target_epsilon=2.0, **QUICK), Silent())
    reproducible = run.experiment().noise == "reproducible"
    notes = made_service(folder.path).guarantee.notes
    assert reproducible == any("follows from the seed" in note for note in notes)


def test_opendps_noise_repeats_for_nobody_and_proves_the_same(run: RunFolder, tmp_path: Path) -> None:
    pytest.importorskip("opendp.prelude", reason="OpenDP is not installed: pip install fedpriv[opendp]")
    images = build_world(run.experiment()).dataset.x_test[:40]
    logits, proven = [], []
    for name, by in (("one", "opendp"), ("two", "opendp"), ("three", "seeded")):
        folder = copied(run, tmp_path / name)
        wanted = config("logits", target_epsilon=5.0, randomness=by, repeats="charged", **QUICK)
        logits.append(np.log(open_service(folder, wanted, Silent()).ask(images[:20]).probabilities))
        service = made_service(folder.path)
        proven.append(replace(service.guarantee, notes=()))
        assert any("no seed repeats it" in note for note in service.guarantee.notes) == (by == "opendp")
        assert any("follows from the seed" in note for note in service.guarantee.notes) == (by == "seeded")
        assert ("randomness" in service.settings) == (by == "opendp")
        open_service(folder, wanted, Silent())
    assert proven[0] == proven[1] == proven[2]
    # Of 200 numbers, two come within 1e-5 of each other once in 200 runs; none is the same.
    assert not np.equal(logits[0], logits[1]).any()
    again = np.log(open_service(RunFolder.open(tmp_path / "one"), None, Silent()).ask(images[:20]).probabilities)
    assert not np.equal(logits[0], again).any()


def test_without_opendp_nothing_is_made_or_answered(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(run, tmp_path / "run")
    opendp.cache_clear()
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    with pytest.raises(
        InputError, match=r"service.randomness = 'opendp' needs OpenDP .*pip install 'fedpriv\[opendp\]'"
    ):
        open_service(folder, config("label", noise=1.0, randomness="opendp", **QUICK), Silent())
    assert folder.read(Service) is None
    open_service(folder, config("label", noise=1.0, **QUICK), Silent())
    path = folder.path / "service" / "service.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, "settings": {**known["settings"], "randomness": "opendp"}}))
    (folder.path / "service" / "charges.jsonl").unlink()
    with pytest.raises(InputError, match="needs OpenDP"):
        open_service(folder, None, Silent())


@pytest.mark.parametrize("weights", [np.zeros((3, 5)), np.full((10, 16), np.nan)])
def test_damaged_weights_are_one_line(run: RunFolder, tmp_path: Path, weights: NDArray[np.float64]) -> None:
    folder = copied(run, tmp_path / "run")
    open_service(folder, config("model", target_epsilon=2.0, **QUICK), Silent())
    (folder.path / "service" / "model.safetensors").write_bytes(save({"weights": weights}))
    with pytest.raises(InputError, match=r"model\.safetensors is damaged: expected finite weights of 10 x 16"):
        open_service(folder, None, Silent())
