#!/usr/bin/env bash
# torchmetrics 1.9.0: the AUC of membership scores depends on the batches in which they are added, and far scores are ties.
#
# Guess: an area under the ROC curve depends on the order of the scores alone, so that any monotone scale will do.
# Seen: a batch with a score outside [0, 1] goes through a sigmoid in float32, any other is taken as it is. Losses from
# 100 to 160 all become 1: their AUC of 0.876 is printed as 0.5. Small scores around 0, half of them negative, have 0.748
# all at once and 0.703 in batches of two, because the batches are on two scales.
. "$(dirname "$0")/packages.bash"
packages torchmetrics==1.9.0 torch==2.15.0
python -W ignore - <<'END'
import torch
from torchmetrics.classification import BinaryAUROC

generator = torch.Generator().manual_seed(0)
is_member = torch.arange(4_000) % 2


def exact(scores):
    """The share of pairs of a member and another in which the member's score is larger."""
    return float((scores[is_member == 1][:, None] > scores[is_member == 0]).double().mean())


def measured(scores, batch):
    metric = BinaryAUROC()
    for part, truth in zip(scores.split(batch), is_member.split(batch)):
        metric.update(part, truth)
    return float(metric.compute())


near = 0.27 * is_member + 0.3 * torch.randn(4_000, generator=generator)
far = 100 + 20 * is_member + 40 * torch.rand(4_000, generator=generator)
for name, scores in (("around 0", near), ("from 100 to 160", far)):
    values = {batch: round(measured(scores, batch), 3) for batch in (4_000, 20, 2)}
    print(f"scores {name}: AUC {exact(scores):.3f}; torchmetrics, by the size of batches: {values}")
assert abs(measured(near, 4_000) - exact(near)) < 0.001 < 0.04 < exact(near) - measured(near, 2)
assert exact(far) > 0.8 and measured(far, 4_000) == 0.5
END
