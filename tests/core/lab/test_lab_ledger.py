"""The ledger of a run: a line for each client, the worst first, with its own noise, in JSON, report and words."""

import json
from pathlib import Path

import pytest

from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import write_report
from fedpriv.core.world import build_world
from tests.integration.small import experiment


@pytest.mark.parametrize(
    ("mechanism", "key", "differs"),
    [
        ({"name": "gaussian", "target_epsilon": 3.0}, "sigma", True),
        ({"name": "laplace", "scale": 2.0}, "scale", False),
        ({"name": "none"}, None, False),
    ],
    ids=str,
)
def test_every_client_has_its_line_and_its_noise(
    mechanism: dict[str, object], key: str | None, differs: bool, tmp_path: Path
) -> None:
    settings = experiment(
        mechanism=mechanism, data={"partition": "dirichlet"}, training={"sampling": "fixed", "batch_size": 16}
    )
    summary = start_run(settings, tmp_path / "run", "", Silent())
    tree = json.loads((tmp_path / "run" / "ledger.json").read_text())
    plans = build_world(settings).plans
    lines = tree["clients"]
    assert sorted(line["client"] for line in lines) == [0, 1, 2, 3]
    assert tree["worst"] == lines[0]
    for line in lines:
        plan = plans[line["client"]]
        assert line["examples"] == plan.sampling.examples
        assert line["noise"] == plan.config.noise
        assert line["epsilon"] == plan.guarantee([1, 2, 3]).epsilon
    assert (len({line["noise"] for line in lines}) > 1) == differs
    worst = lines[0]["epsilon"]
    assert summary.ledger is not None
    assert summary.ledger.epsilon == worst
    page = write_report(tmp_path / "run").read_text()
    assert (f'<th scope="col" class="number">{key}</th>' in page) == differs
    if worst is not None:
        assert worst == max(line["epsilon"] for line in lines)
        assert any(f"epsilon {worst:.4g} at delta 1e-05" in sentence for sentence in summary.verdict)
