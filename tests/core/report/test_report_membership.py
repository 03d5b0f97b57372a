"""Membership in a report: the attacks, their curves, and the empirical lower bound on epsilon beside what is proven."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_report_page import parse

from fedpriv.attacks.membership.report import Curve, MembershipAttack, roc_plot
from fedpriv.core.errors import InputError
from fedpriv.core.report import render_page
from fedpriv.core.report.view import load_view

MakeRun = Callable[..., Path]


def audited(folder: Path, bound: float = 0.4, proven: float | None = 3.5, auc: float = 0.61) -> Path:
    """Put an audit's results into a run's folder."""
    rates = [0.001, 0.01, 0.1, 1.0]
    attacks = [
        {
            "attack": name,
            "members": 200,
            "non_members": 200,
            "auc": auc - gap,
            "tpr_at_1_percent": 0.0425,
            "tpr_at_01_percent": 0.0125,
            "advantage": 0.19,
            "confidence": 0.95,
            "intervals": {
                "auc": [auc - gap - 0.05, auc - gap + 0.05],
                "tpr_at_1_percent": [0.0125, 0.0825],
                "tpr_at_01_percent": [0.0025, 0.0325],
            },
            "curve": {"false_positive_rate": rates, "true_positive_rate": [0.0125, 0.0425, 0.3, 1.0]},
        }
        for name, gap in (("attack-r", 0.04), ("lira-online", 0.0))
    ]
    found: dict[str, Any] = {
        "game": "Candidates: as many members as test images.",
        "references": 32,
        "rounds": [20],
        "attacks": attacks,
        "epsilon_bound": {
            "epsilon": bound, "delta": 1e-5, "confidence": 0.95, "trials": 200, "method": "Steinke et al. 2023",
        },
        "proven_epsilon": proven,
        "proven_adjacency": "replace-one: one example is replaced",
    }  # fmt: skip
    (folder / "membership.json").write_text(json.dumps(found))
    return folder


def test_every_attack_and_both_epsilons_are_shown(make_run: MakeRun) -> None:
    root = parse(render_page(load_view(audited(make_run()))))
    section = root.section("membership")
    assert [row.find("th")[0].text for row in section.find("tr")[1:]] == ["attack-r", "lira-online"]
    assert "0.610 0.560 to 0.660" in section.text
    assert "0.0125 0.0025 to 0.0325" in section.text and "0.043" in section.text
    assert "ε is at least 0.4" in section.text and "ε is at most 3.5" in section.text
    assert "32 reference models" in section.text and "200 canaries" in section.text
    assert len(section.find("picture")) == 1
    assert not root.find("div", "error") and not root.find("dd", "error")
    tile = next(one for one in root.find("section", "tile") if "Membership" in one.text)
    assert "0.610" in tile.text and "lira-online" in tile.text
    assert "alarm" in (tile.attributes["class"] or "")


def test_a_bound_above_the_proof_is_an_error_in_red(make_run: MakeRun) -> None:
    root = parse(render_page(load_view(audited(make_run(), bound=3.6, proven=3.5))))
    (error,) = root.find("div", "error")
    assert "the ledger is refuted" in error.text
    assert "ε of at least 3.6, claimed: at most 3.5" in root.section("refuted-membership").text
    assert "ε of at least 3.6" in error.text and "claimed: at most 3.5" in error.text
    assert root.section("membership").find("dd", "error")
    tile = next(one for one in root.find("section", "tile") if "Membership" in one.text)
    assert "exceeds the ε that the ledger claims" in tile.text
    equal = parse(render_page(load_view(audited(make_run(), bound=3.5, proven=3.5))))
    assert not equal.find("div", "error")


def test_an_attack_that_cannot_be_told_from_guessing_is_no_alarm(make_run: MakeRun) -> None:
    """Nor does it give way to one score for all, whose interval has no length and hides how little is known."""
    folder = audited(make_run(), auc=0.49)
    found = json.loads((folder / "membership.json").read_text())
    constant = {**found["attacks"][0], "attack": "rmia-online", "auc": 0.5}
    constant["intervals"] = {**constant["intervals"], "auc": [0.5, 0.5]}
    found["attacks"].append(constant)
    (folder / "membership.json").write_text(json.dumps(found))
    root = parse(render_page(load_view(folder)))
    tile = next(one for one in root.find("section", "tile") if "Membership" in one.text)
    assert "alarm" not in (tile.attributes["class"] or "")
    assert "0.490" in tile.text and "lira-online" in tile.text and "0.440 to 0.540" in tile.text


@pytest.mark.parametrize(
    ("mechanism", "said"),
    [("none", "nothing: there is no mechanism"), ("gaussian", "nothing comparable: replace-one")],
)
def test_what_is_not_proven_is_said(make_run: MakeRun, mechanism: str, said: str) -> None:
    section = parse(render_page(load_view(audited(make_run(mechanism=mechanism), proven=None)))).section("membership")
    assert said in section.text


def test_a_run_without_audit_has_no_such_section(make_run: MakeRun) -> None:
    page = render_page(load_view(make_run()))
    assert 'id="membership"' not in page and "Membership inference" not in page


def test_a_damaged_audit_is_refused(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "membership.json").write_text('{"attacks": []}')
    with pytest.raises(InputError, match=r"membership.json is damaged: epsilon_bound"):
        load_view(folder)


def test_no_points_no_plot() -> None:
    empty = MembershipAttack("attack-p", 5, 5, 0.5, 0.0, 0.0, 0.0)
    assert roc_plot([empty]) is None
    drawn = MembershipAttack("rmia", 5, 5, 0.5, 0.0, 0.0, 0.0, curve=Curve((0.2, 1.0), (0.2, 1.0)))
    plot = roc_plot([empty, drawn])
    assert plot is not None and "areas: rmia 0.500" in plot.alt
    assert b"attack-p" not in plot.light
