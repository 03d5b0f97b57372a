"""pfl-research on its CIFAR-10 set-up, one round for each line of input; a process of its own, with pfl on its path.

Usage: python benchmarks/scale_pfl.py FILE; FILE has ``images`` (clients, examples, C, H, W), uint8, ``labels``
(clients, examples), and ``mean`` and ``std`` of the channels. It prints ``ready``, and after each line of input the CPU
seconds that a round took.
"""

import sys
import time
import types
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.scale import TOLD, cnn

ROUNDS = 1000
A_ROUND = 50


class RoundsOnRequest(TrainingProcessCallback):
    """Waits before each round for a line of input, and prints what the round took."""

    def on_train_begin(self, *, model: Any) -> Any:
        """Say that all is built, and wait."""
        self._wait("ready")
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        """Say what the round took, and wait; without a further line, training ends."""
        return self._wait(time.process_time() - self._began), Metrics()

    def _wait(self, told: object) -> bool:
        # pfl prints lines of its own.
        print(f"{TOLD}{told}", flush=True)
        asked = sys.stdin.readline()
        self._began = time.process_time()
        return not asked


def _loss(self: nn.Module, images: Tensor, labels: Tensor, eval: bool = False) -> Tensor:
    self.train(not eval)
    return functional.cross_entropy(self(images), labels)


def _no_metrics(*_values: object, **_options: object) -> dict[str, Any]:
    return {}


def main() -> None:
    """Train for as many rounds as lines come in."""
    torch.set_num_threads(1)
    held = np.load(sys.argv[1], allow_pickle=False)
    mean, std = (torch.from_numpy(held[name]).float()[:, None, None] for name in ("mean", "std"))
    pairs = zip(held["images"], held["labels"], strict=True)
    users = [((torch.from_numpy(x) / 255 - mean) / std, torch.from_numpy(y)) for x, y in pairs]
    _, channels, height, width = users[0][0].shape
    network: Any = cnn((channels, height, width), 10)
    network.loss = types.MethodType(_loss, network)
    network.metrics = _no_metrics
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    data = FederatedDataset.from_slices(users, get_user_sampler("random", range(len(users))))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=ROUNDS, evaluation_frequency=2 * ROUNDS, train_cohort_size=A_ROUND, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(local_learning_rate=0.1, local_num_epochs=1, local_batch_size=10),
        model_eval_params=NNEvalHyperParams(local_batch_size=10_000),
        callbacks=[RoundsOnRequest()],
    )


if __name__ == "__main__":
    main()
