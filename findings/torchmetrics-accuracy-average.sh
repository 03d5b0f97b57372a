#!/usr/bin/env bash
# torchmetrics 1.9.0: Accuracy(task="multiclass") counts examples, MulticlassAccuracy averages over classes.
#
# Guess: Accuracy is a wrapper that returns the class of the task, so that both give one number by default.
# Seen: the wrapper has average="micro", the class average="macro". Of 100 examples, 90 of them of one class, a network
# that always names this class is right in 90 % by Accuracy and in 50 % by MulticlassAccuracy. Precision, Recall and
# F1Score differ in the same way, and so do the functional forms. Nothing warns; clients with skewed labels look worse.
. "$(dirname "$0")/packages.bash"
packages torchmetrics==1.9.0 torch==2.15.0
python -W ignore - <<'END'
import torch
import torchmetrics
from torchmetrics import classification, functional

labels = torch.tensor([0] * 90 + [1] * 10)
named = torch.zeros(100, dtype=torch.long)
EXPECTED = {"Accuracy": (0.9, 0.5), "Precision": (0.9, 0.45), "Recall": (0.9, 0.5), "F1Score": (0.9, 0.9 / 1.9)}
for name, (examples, classes) in EXPECTED.items():
    wrapper = getattr(torchmetrics, name)(task="multiclass", num_classes=2)(named, labels).item()
    own = getattr(classification, f"Multiclass{name}")(num_classes=2)(named, labels).item()
    print(f"{name}: {wrapper:.3f} by the wrapper, {own:.3f} by Multiclass{name}")
    assert abs(wrapper - examples) < 1e-6 and abs(own - classes) < 1e-6, name

wrapper = functional.accuracy(named, labels, task="multiclass", num_classes=2).item()
own = functional.classification.multiclass_accuracy(named, labels, num_classes=2).item()
print(f"functional: {wrapper:.3f} by accuracy, {own:.3f} by multiclass_accuracy")
assert abs(wrapper - 0.9) < 1e-6 and abs(own - 0.5) < 1e-6
END
