"""What the mods of one's own Flower app cost a round: CPU time with tap or privatise over that without.

One client trains a small CNN for one epoch of 4,000 random images of 32 x 32 in three channels, in batches of 32: a
tenth of CIFAR-10, as in Flower's first example. The three ways take turns in one process; each round is the first one
of its client, which is the one that the tap writes.
"""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from benchmarks.measure import in_turns, medians, options, report, save
from fedpriv.engines.inline import assume_server_identity
from fedpriv.flower import privatise, tap
from studies.arguments import whole

IMAGES, BATCH, RATE = 4000, 32, 0.01


def small_cnn() -> nn.Module:
    """The network of PyTorch's first tutorial, for images (B, 3, 32, 32): 62,006 parameters."""
    convolutions = (nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2))
    linear = (nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
    return nn.Sequential(*convolutions, nn.Flatten(), *linear)


def _app(mods: list[Any]) -> ClientApp:
    stream = torch.Generator().manual_seed(0)
    images, labels = torch.rand(IMAGES, 3, 32, 32, generator=stream), torch.randint(10, (IMAGES,), generator=stream)
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net = small_cnn()
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
        for rows in torch.randperm(IMAGES).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimizer.step()
        content = RecordDict({"arrays": ArrayRecord(net.state_dict())})
        content["metrics"] = MetricRecord({"num-examples": IMAGES})
        return Message(content, reply_to=message)

    return app


def _round(app: ClientApp, folder: Path) -> float:
    """CPU seconds of a client's first round."""
    os.environ["FEDPRIV_RUNS"] = tempfile.mkdtemp(dir=folder)
    content = RecordDict({"arrays": ArrayRecord(small_cnn().state_dict()), "config": ConfigRecord({"server-round": 1})})
    message = Message(content, 1, "train")
    began = time.process_time()
    app(message, Context(1, 1, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {}))
    return time.process_time() - began


def main() -> None:
    """Measure and print one line."""
    parser = options("flower_mods", __doc__)
    parser.add_argument("--turns", type=whole(1), default=9, help="rounds of each way")
    with parser.parsed() as asked, tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        assume_server_identity(1)
        path = Path(folder) / "fedpriv.toml"
        noise = '[mechanism]\nname = "gaussian"\nclip_norm = 1.0\nsigma = 1.0\n'
        path.write_text(f'[tap]\n{noise}[privatise]\nfolder = "{folder}/privacy"\n')
        mods = {"app alone": [], "tap": [tap(path)], "privatise": [privatise(path)]}
        ways: dict[str, Callable[[], float]] = {
            name: partial(_round, _app(chosen), Path(folder)) for name, chosen in mods.items()
        }
        in_turns(ways, 1)
        taken = medians(in_turns(ways, asked.turns))
        rows = [{"way": name, "seconds": value, "ratio": value / taken["app alone"]} for name, value in taken.items()]
        report({"way": "{way}", "CPU s": "{seconds:.3f}", "over the app alone": "{ratio:.3f}"}, rows)
        save(asked.json, rows=rows)


if __name__ == "__main__":
    main()
