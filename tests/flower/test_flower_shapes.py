"""Apps of every shape, each in its framework: what leaves is told of truly, with the tap and with privatise.

Frameworks that the project does not depend on are installed on demand: ``make flower-test``.
"""

import csv
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message

from fedpriv.engines.inline import InlineGrid, run_server
from fedpriv.flower.app_settings import TapSettings
from fedpriv.flower.audit.audit import summed_up
from fedpriv.flower.audit.observers import ObservedApp, observing_mods, observing_strategies
from fedpriv.flower.audit.simulation import Simulated, read_answers
from fedpriv.flower.uploads import first_inputs
from tests.flower.apps import context, question
from tests.flower.shapes import CLIENTS, EXAMPLES, SHAPES, ask, digits, missing

# Claims that hold of no app here: nothing was protected, or recovered, or seen, where it was.
LEADS_NOWHERE = re.compile(r"Traceback|set tap\.shape|was not seen to take images")


# Their networks train for long: with the frameworks that are installed on demand.
LONG = {"ViT", "Hugging Face", "language model", "language model, LoRA", "Trainer", "accelerate"}


@pytest.mark.parametrize("name", SHAPES)
def test_what_leaves_an_app_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if absent := missing(name):
        pytest.skip(f"not installed: {', '.join(absent)}; make flower-test installs them")
    if name in LONG and not os.environ.get("FEDPRIV_FRAMEWORKS"):
        pytest.skip("takes long: make flower-test")
    monkeypatch.setenv("FEDPRIV_RUNS", "")  # set anew by each
    said = ask(name, tmp_path / "tap", protected=False)
    assert not said.refused and said.summary is not None
    assert SHAPES[name].says in said.text
    assert not LEADS_NOWHERE.search(said.text)
    assert not re.search(rf"recovered 0 of {CLIENTS * EXAMPLES}", said.text) or not _is_doubted(said.text)
    protected = ask(name, tmp_path / "privatise", protected=True, iterations=5)
    if SHAPES[name].protected:
        assert SHAPES[name].protected in " ".join([protected.text, *protected.logged])
        assert not protected.ledgers
    else:
        assert protected.summary is not None
        assert re.search(r"Proven, of client .*-DP|bounded by its ledger", protected.text)
        assert {ledger["participations"] for ledger in protected.ledgers.values()} <= {1, 2}
        assert len(protected.ledgers) == CLIENTS
        assert "num-examples = 1" not in protected.text.replace("(num-examples = 1", "")


def _is_doubted(text: str) -> bool:
    return "the training that was watched is another than ours" in text


VERDICTS = {
    "own names": {"model-weights": "uncovered", "facts.n": "uncovered"},
    "own query": {
        "means": "raw data",
        "facts.centre": "constant",
        "facts.ages": "raw data",
        "facts.scan": "raw data",
    },
    "segmentation": {"arrays": "uncovered", "metrics.num-examples": "uncovered", "metrics.train_loss": "uncovered"},
}


@pytest.mark.parametrize("name", VERDICTS)
def test_audits_list_what_leaves_apps_that_nothing_was_made_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))
    with observing_strategies() as notes, observing_mods(tmp_path, TapSettings(), tmp_path) as mods:
        client, server = SHAPES[name].build([])
        run_server(server, InlineGrid(ObservedApp(client, tmp_path), CLIENTS))  # type: ignore[arg-type]
    run = Simulated(tuple(mods), notes.layers, tuple(notes.rounds))
    audit = summed_up(name, run, read_answers(tmp_path), None, tmp_path)
    assert {each.name: each.verdict for each in audit.leaving} == VERDICTS[name]
    assert not audit.claims and audit.messages == CLIENTS


@pytest.mark.parametrize("name", ["Keras", "JAX", "scikit-learn"])
def test_real_networks_give_every_digit_away(name: str) -> None:
    """One digit a message, of a client's own training: read off the first layer alone, without the network."""
    if absent := missing(name):
        pytest.skip(f"not installed: {', '.join(absent)}; make flower-test installs them")
    app, start = SHAPES[name].build([])[0], asked_of(name)
    for number in range(10):
        message = question({}, number=1)
        message.content["arrays"] = ArrayRecord(start)
        reply = app(message, context(partition=number))
        after = reply.content.array_records["arrays"].to_numpy_ndarrays()
        pairs = enumerate(zip(start, after, strict=True))
        update = {str(place): torch.tensor(now.astype(float) - before).float() for place, (before, now) in pairs}
        found = first_inputs(update)
        assert found is not None and found.shape == (1, 64)
        torch.testing.assert_close(found[0], digits()[0][EXAMPLES * number].flatten(), atol=1e-3, rtol=0)


def asked_of(name: str) -> list[np.ndarray]:
    """The parameters that an app's server begins with."""
    sent: list[list[np.ndarray]] = []

    def hearing(message: Message, own: Context, call_next: Any) -> Message:
        sent.append(message.content.array_records["arrays"].to_numpy_ndarrays())
        return call_next(message, own)

    client, server = SHAPES[name].build([hearing])
    run_server(server, InlineGrid(client, 2))
    return sent[0]


def test_the_table_has_a_row_for_each() -> None:
    with (Path(__file__).parents[2] / "docs" / "results" / "flower-shapes.csv").open(newline="") as file:
        assert set(SHAPES) <= {row["app"] for row in csv.DictReader(file)}
