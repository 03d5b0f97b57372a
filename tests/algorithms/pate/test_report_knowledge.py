"""The report's section about votes: what was asked, answered and learnt, and no figure that depends on votes alone."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from test_report_page import parse, tile

from fedpriv.algorithms.pate.records import Knowledge, VotedAnswer
from fedpriv.core.config import Experiment
from fedpriv.core.report import load_view, render_page
from fedpriv.core.runs import RunFolder
from tests.integration.small import BASE

MakeRun = Callable[..., Path]


def voted(folder: Path, *, sanitised: float | None = None, aggregator: str = "confident") -> Path:
    """Make a run's folder that of a run in which clients voted."""
    federation = {"algorithm": "pate", "clients": 4, "rounds": 1}
    settings = Experiment.model_validate({**BASE, "federation": federation, "pate": {"aggregator": aggregator}})
    (folder / "config.toml").write_text(settings.to_toml())
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "settings": ""}))
    run = RunFolder.open(folder)
    answers = [VotedAnswer(7, True, 1), VotedAnswer(3, False, None), VotedAnswer(5, True, 1)]
    run.write_jsonl("answers.jsonl", [asdict(answer) for answer in answers])
    run.write(
        Knowledge(
            aggregator=aggregator, noise_at="server", teachers=4, voted=3, planned=9, asked=3, answered=2, right=0.5,
            student=0.75, evaluated=20, budget=3.0, spent=2.5, delta=1e-5, sanitised=sanitised,
        )
    )  # fmt: skip
    return folder


def test_what_was_asked_and_learnt_is_shown(make_run: MakeRun) -> None:
    root = parse(render_page(load_view(voted(make_run()))))
    text = root.section("knowledge").text
    for words in ("3 of 4 voted", "9 test images", "3, 2 answered", "50.0%", "75.0% of the other 20", "ε 2.5", "ε 3"):
        assert words in text
    assert "must be trusted" in text
    assert "budget is the claim" in text
    assert "anitised" not in text
    assert tile(root, "Questions answered by vote").text.count("2")


def test_a_data_dependent_figure_is_called_an_estimate(make_run: MakeRun) -> None:
    root = parse(render_page(load_view(voted(make_run(), sanitised=1.87))))
    text = root.section("knowledge").text
    assert "about ε 1.87: an estimate, no bound" in text
    assert "above or below the true figure" in text


def test_a_run_without_votes_has_no_such_section(make_run: MakeRun) -> None:
    page = render_page(load_view(make_run()))
    assert 'id="knowledge"' not in page


@pytest.mark.parametrize("line", ['{"query": 1, "answered": true, "label": null}', '{"query": -1}'])
def test_damaged_answers_are_refused(make_run: MakeRun, line: str) -> None:
    folder = voted(make_run())
    (folder / "answers.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 1 is damaged"):
        load_view(folder)
