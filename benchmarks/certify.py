"""How long votes take: many at a time behind one first layer, against a loop of single forward passes.

Usage: python -m benchmarks.certify [--votes 1000] [--images 5] [--json FILE]

batched: SmoothedNetwork.votes, in microseconds a vote. loop: one forward pass of the whole network for each vote, with
its noise, and its argmax. ratio: loop over batched. norms: bounding the first layer's norms, in milliseconds. MNIST
images (random ones, which take as long), one thread, medians of the repeats. Where one image alone keeps a core busy,
as in convnet, there is little to gain.
"""

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import options, save, seconds, show
from fedpriv.config import RobustnessConfig
from fedpriv.models import model_settings
from fedpriv.models.machinery.build import build_model
from fedpriv.randomness import torch_stream
from fedpriv.smoothing import (
    FirstLayer,
    SmoothedNetwork,
    build_smoothing,
    drawing,
    layer_norms,
    noise_layers,
    with_noise,
)

_SHAPE, _CLASSES, _REPEATS = (1, 28, 28), 10, 5
_MODELS: tuple[dict[str, Any], ...] = (
    {"name": "lenet"},
    {"name": "mlp"},
    {"name": "mlp", "hidden": [64]},
    {"name": "strided"},
    {"name": "convnet"},
)


def main() -> None:
    """Measure, print a table, and write the rows."""
    parser = options(__doc__)
    parser.add_argument("--votes", type=int, default=1000)
    parser.add_argument("--images", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(_measured(arguments.votes, arguments.images))
    words, figures = ("model", "place"), ("batched", "loop", "ratio", "norms")
    show(
        (*words, *figures), [(*(row[key] for key in words), *(f"{row[key]:.1f}" for key in figures)) for row in rows], 2
    )
    save(arguments.json, votes=arguments.votes, images=arguments.images, rows=rows)


def _measured(votes: int, count: int) -> Iterator[dict[str, Any]]:
    images = torch.rand(count, *_SHAPE, generator=torch_stream(1, "images"))
    for settings in _MODELS:
        for place in ("hidden", "input"):
            model, first = _smoothed(settings, RobustnessConfig(noise=0.5, place=place))
            name = f"{settings['name']} {settings.get('hidden', '')}".strip()
            yield {"model": name, "place": place, **_times(model, first, images, votes)}


def _times(model: SmoothedNetwork, first: FirstLayer, images: Tensor, votes: int) -> dict[str, float]:
    batched = partial(model.votes, images, votes, "benchmark", range(len(images)))
    alone = partial(_loop, model, images[:1], max(100, votes // 10))
    deviations = model.layer.deviations
    if deviations is None:
        raise ValueError("no noise")
    batched(), alone()
    # Side by side, so that whatever else the machine does is in both.
    pairs = [(seconds(batched), seconds(alone)) for _ in range(_REPEATS)]
    together = statistics.median(pair[0] for pair in pairs) / (votes * len(images))
    single = statistics.median(pair[1] for pair in pairs) / max(100, votes // 10)
    norms = seconds(lambda: layer_norms(first, deviations))
    return {"batched": 1e6 * together, "loop": 1e6 * single, "ratio": single / together, "norms": 1e3 * norms}


def _loop(model: SmoothedNetwork, image: Tensor, votes: int) -> None:
    stream = torch_stream(1, "loop")
    with drawing(model.smoothing, model.network, stream), torch.inference_mode():
        for _ in range(votes):
            model.network(model.normalise(image)).argmax(dim=1)


def _smoothed(settings: dict[str, Any], config: RobustnessConfig) -> tuple[SmoothedNetwork, FirstLayer]:
    network = build_model(model_settings(settings), _SHAPE, _CLASSES, 0)
    network = with_noise(network, config.place, _SHAPE, torch_stream(1, "trial")).eval()
    first = FirstLayer(network, noise_layers(network)[0], lambda pixels: (pixels - 0.13) / 0.31, _SHAPE)
    smoothing = build_smoothing(config, first, _no_images)
    return SmoothedNetwork(network, smoothing, first.normalise, _CLASSES, 0), first


def _no_images(wanted: int) -> tuple[Tensor, Tensor]:
    raise ValueError("even noise needs no public images")


if __name__ == "__main__":
    main()
