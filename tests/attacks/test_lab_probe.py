"""``fedpriv probe`` on a finished model: what is written, what stays, who is refused, and the report of it."""

import json
from pathlib import Path

import pytest

from fedpriv.attacks.endpoint.probe import probe_run
from fedpriv.attacks.endpoint.probes.extraction import EquationSolving, Extraction
from fedpriv.attacks.endpoint.probes.mi_face import MiFace
from fedpriv.attacks.endpoint.report import Probe, extraction_plot
from fedpriv.core.errors import InputError
from fedpriv.core.lab import resume_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import load_view, render_page
from fedpriv.core.runs import RunFolder
from tests.integration.small import left_behind
from tests.robustness.test_certify import copied
from tests.service.test_lab_endpoint import finished

ATTACKS = (EquationSolving(), Extraction(points=2), MiFace(steps=2))
SOFTMAX: dict[str, dict[str, object]] = {"model": {"hidden": []}, "engine": {"precision": "float64"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finished(tmp_path_factory.mktemp("probe") / "run", **SOFTMAX)


@pytest.fixture(scope="module")
def probed(run: RunFolder) -> tuple[dict[str, object], Probe]:
    """What was there before, and what was found."""
    before = left_behind(run.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedpriv.attacks.endpoint.probes.extraction.LBFGS_STEPS", 20)
        return before, probe_run(run, ATTACKS, "none", 80, "participant", Silent())


def test_results_are_added_and_the_rest_stays(run: RunFolder, probed: tuple[dict[str, object], Probe]) -> None:
    before, found = probed
    after = left_behind(run.path)
    added = set(after) - set(before)
    pictures = {f"probe/mi-face-{label:04d}.png" for label in range(10)} | {"probe/floor.png"}
    assert added == {"probe.json"} | pictures
    assert {name for name in before if before[name] != after[name]} == {"summary.json"}
    assert run.read(Probe) == found
    assert json.loads((run.path / "summary.json").read_text())["probe"] == found.model_dump(mode="json")
    assert found.heuristic and not any(each.exceeded for each in found.figures) and not found.refusals
    asked = {(result.attack, result.variant): result.queries for result in found.results}
    assert asked[("equation-solving", "")] == 65 and asked[("mi-face", "cost -log p, start public")] == 0
    assert max(asked.values()) == 80
    assert found.results[0].figures[0].measured.value == 1.0 and found.results[0].figures[-1].measured.value < 1e-10
    resume_run(run.path, Silent())
    summary = run.summary()
    assert summary is not None and (summary.model_extra or {})["probe"] == found.model_dump(mode="json")


def test_the_report_has_guess_measured_and_ceiling(run: RunFolder, probed: tuple[dict[str, object], Probe]) -> None:
    _, found = probed
    text = " ".join(render_page(load_view(run.path)).split())
    assert "What the finished model and its answers reveal" in text
    assert "nothing proven" in text and "agreement on test images" in text
    assert "Extraction by equation solving" in text and "Model inversion (MI-FACE)" in text
    assert text.count("Class 3") == 1 and "Classes have numbers here, and no names" in text
    assert "how they look" in text and "tell" in text
    plot = extraction_plot(found)
    assert plot is not None and b"mathdefault" not in plot.light and b">questions<" in plot.light
    assert "extraction: random images, probabilities: " in plot.alt and " after 80" in plot.alt


def test_an_attack_that_the_threat_model_withholds_is_refused(
    run: RunFolder, probed: tuple[dict[str, object], Probe], tmp_path: Path
) -> None:
    run = copied(run, tmp_path / "run")
    with pytest.raises(InputError, match=r"mi-face needs the finished model, which the threat model user withholds"):
        probe_run(run, [MiFace()], None, 80, "user", Silent())
    found = probe_run(run, [MiFace(), EquationSolving()], "rounded:3", 65, "user", Silent())
    assert [result.attack for result in found.results] == ["equation-solving"]
    assert found.refusals == ("mi-face needs the finished model, which the threat model user withholds",)
    assert not list((run.path / "probe").glob("*.png"))  # those of an earlier probe are gone
    with pytest.raises(InputError, match="this policy names labels only"):
        probe_run(run, [EquationSolving()], "label-only", 80, "user", Silent())
    assert run.read(Probe) == found  # nothing was written


def test_the_endpoints_own_policy_and_budget_are_those_of_the_run(tmp_path: Path) -> None:
    service = {"method": "rounded:1", "answers": 30}
    folder = finished(tmp_path / "run", **SOFTMAX, service=service)
    found = probe_run(folder, [EquationSolving()], None, None, "user", Silent())
    assert (found.answers, found.results[0].queries) == ("rounded:1", 16)
    assert found.results[0].figures[0].ceiling is None


def test_without_public_images_less_can_be_asked(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", **SOFTMAX, adversary={"attacks": [], "knows_public_data": False})
    with pytest.raises(InputError, match="needs public images for start = 'public'"):
        probe_run(folder, [MiFace()], None, None, "participant", Silent())
    found = probe_run(folder, [MiFace(start="grey", steps=1)], None, None, "participant", Silent())
    assert found.results[0].figures[2].guess is not None  # a grey picture
