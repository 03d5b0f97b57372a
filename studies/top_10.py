"""Top-10 accuracy of a trial's final model, which the paper reports for LFW: its faces are of a hundred people."""

from dataclasses import replace
from pathlib import Path

import torch
from scipy.stats import binomtest
from torchmetrics.functional.classification import multiclass_accuracy

from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.sweep.record import TrialRecord


def with_top_10(sweep: Path, record: TrialRecord) -> TrialRecord:
    """Return a record with the top-10 accuracy in the place of accuracy, with Wilson's interval at 95 %."""
    folder = RunFolder.open(sweep / record.folder)
    checkpoint = folder.load_checkpoint()
    if record.failed or checkpoint is None:
        return record
    world = build_world(folder.experiment())
    parameters = {name: checkpoint.tensors[f"parameters/{name}"] for name in world.initial.parameters}
    replace(world.initial, parameters=parameters).load_into(world.model)
    world.model.eval()
    labels = world.dataset.y_test
    with torch.no_grad():
        outputs = world.model(world.network_input(world.dataset.x_test)).cpu()
    share = float(multiclass_accuracy(outputs, labels, world.dataset.classes, average="micro", top_k=10))
    interval = binomtest(round(share * len(labels)), len(labels)).proportion_ci(method="wilson")
    return record.model_copy(
        update={"accuracy": share, "accuracy_low": float(interval.low), "accuracy_high": float(interval.high)}
    )
