"""The run folder: what is written where, and read back.

Files appear whole (:mod:`fedpriv.core.files`), and the line-by-line metrics are cut back to the last checkpoint on
resume. A kill at any moment leaves a folder that can be finished. The checkpoint and all else that a resumed run
relies on (settings, observations, the lines about the rounds until then) are on the disk before the run goes on, and
so outlive a power failure, too.

A resumed run leaves the same bytes as an uninterrupted one, but for what tells of its course:

- metrics.jsonl: the ``seconds`` of each round;
- asked.jsonl: a round that was cut off may be there twice;
- summary.json: ``seconds`` and ``attack_seconds``, which are of the last start;
- report.html: these times.

Where an attack takes minutes, its code is compiled if that pays, by the clock: scores and pictures may then differ by
rounding, in two uninterrupted runs as well (:mod:`fedpriv.attacks.reconstruction.evaluation`).
"""

from fedpriv.core.runs.folder import DEPLOYMENT, NOTICES, Checkpoint, RunFolder, picture_name

__all__ = ["DEPLOYMENT", "NOTICES", "Checkpoint", "RunFolder", "picture_name"]
