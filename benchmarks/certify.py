"""How long votes take: many at a time behind one first layer, against a loop of single forward passes.

batched: SmoothedNetwork.votes, in microseconds a vote. loop: one forward pass of the whole network for each vote, with
its noise, and its argmax. ratio: loop over batched. rest: the layers behind the noise alone, on noise that was drawn
before. normals: drawing standard normal numbers alone, into memory that is there. Both at the best of several batch
sizes. at most: loop over rest + normals, beyond which no batched vote gets with these products and this generator.
norms: bounding the first layer's norms, in milliseconds. MNIST images (random ones, which take as long), medians of the
repeats. With one thread it is CPU time; with more it is time by the clock, on a machine that does nothing else, and the
loop has as many threads or one, whichever is faster.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import in_turns, medians, options, report, save, seconds
from fedpriv.core.randomness import torch_stream
from fedpriv.core.threads import cpu_threads
from fedpriv.diagnosis.cost import cpu_seconds
from fedpriv.models import model_settings
from fedpriv.models.machinery.build import build_model
from fedpriv.robustness.build import build_smoothing, with_noise
from fedpriv.robustness.noise import noise_layers
from fedpriv.robustness.norms import FirstLayer
from fedpriv.robustness.settings import RobustnessConfig
from fedpriv.robustness.smoothed import SmoothedNetwork
from studies.arguments import listed, whole

_SHAPE, _CLASSES, _REPEATS = (1, 28, 28), 10, 5
_BATCHES = (8, 32, 128, 256, 512)
_MODELS: dict[str, dict[str, Any]] = {
    "lenet": {"name": "lenet"},
    "mlp": {"name": "mlp"},
    "mlp-64": {"name": "mlp", "hidden": [64]},
    "strided": {"name": "strided"},
    "convnet": {"name": "convnet"},
}


def main() -> None:
    """Measure, print a table, and write the rows."""
    parser = options("certify", __doc__)
    parser.add_argument("--votes", type=whole(1), default=1000)
    parser.add_argument("--images", type=whole(1), default=5)
    parser.add_argument("--models", type=listed(_MODELS), default=tuple(_MODELS), help="networks, by commas")
    parser.add_argument("--threads", type=whole(1), default=1)
    with parser.parsed() as asked:
        with cpu_threads(asked.threads):
            rows = list(_measured(asked.models, asked.votes, asked.images))
        figures = ("batched", "loop", "ratio", "rest", "normals", "at most", "norms")
        report({"model": "{model}", "place": "{place}", **{name: f"{{{name}:.1f}}" for name in figures}}, rows, words=2)
        save(asked.json, votes=asked.votes, images=asked.images, rows=rows)


def _measured(names: Sequence[str], votes: int, count: int) -> Iterator[dict[str, Any]]:
    images = torch.rand(count, *_SHAPE, generator=torch_stream(1, "images"))
    for name in names:
        for place in ("hidden", "input"):
            model = _smoothed(_MODELS[name], RobustnessConfig(noise=0.5, place=place))
            yield {"model": name, "place": place, **_times(model, images, votes)}


def _times(model: SmoothedNetwork, images: Tensor, votes: int) -> dict[str, float]:
    deviations, norms = model.deviations, _taken(model.norms)
    few, sizes = max(100, votes // 10), [size for size in _BATCHES if size <= votes]
    with model.first.layer.drawing(torch_stream(1, "loop")):
        ways: list[Callable[[], object]] = [partial(model.votes, images, votes, "benchmark", range(len(images)))]
        ways += [partial(_loop, model, images, few, threads) for threads in (1, torch.get_num_threads())]
        ways += [partial(_rest, model, images, _drawn(model, images, size), votes // size) for size in sizes]
        ways += [partial(_normals, deviations.new_empty(size, *deviations.shape), votes // size) for size in sizes]
        for way in ways:
            way()
        taken = medians(in_turns({place: partial(_taken, way) for place, way in enumerate(ways)}, _REPEATS))
    asked = [votes * len(images), few, few, *(votes // size * size for size in sizes * 2)]
    together, *loops_and_parts = (1e6 * time / count for time, count in zip(taken.values(), asked, strict=True))
    single, parts = min(loops_and_parts[:2]), loops_and_parts[2:]
    rest, normals = min(parts[: len(sizes)]), min(parts[len(sizes) :])
    return {
        "batched": together,
        "loop": single,
        "ratio": single / together,
        "rest": rest,
        "normals": normals,
        "at most": single / (rest + normals),
        "norms": 1e3 * norms,
    }


def _taken(call: Callable[[], object]) -> float:
    """Seconds: of CPU where this process has one thread, else by the clock."""
    return (cpu_seconds if torch.get_num_threads() == 1 else seconds)(call)


def _loop(model: SmoothedNetwork, images: Tensor, votes: int, threads: int) -> None:
    with torch.inference_mode(), cpu_threads(threads):
        for _ in range(votes):
            model.first.network(model.first.normalise(images[:1])).argmax(dim=1)


def _drawn(model: SmoothedNetwork, images: Tensor, size: int) -> Tensor:
    with torch.inference_mode():
        value = model.first.layer.value_at(model.first.network, model.first.normalise(images[:1]))
        return model.first.layer.drawn(value, size, torch_stream(1, "rest"))


def _rest(model: SmoothedNetwork, images: Tensor, values: Tensor, times: int) -> None:
    with torch.inference_mode():
        inputs = model.first.normalise(images[:1]).expand(len(values), -1, -1, -1)
        for _ in range(times):
            model.first.layer.onwards(model.first.network, values, inputs)


def _normals(numbers: Tensor, times: int) -> None:
    stream = torch_stream(1, "normals")
    for _ in range(times):
        numbers.normal_(generator=stream)


def _smoothed(settings: dict[str, Any], config: RobustnessConfig) -> SmoothedNetwork:
    network = build_model(model_settings(settings), _SHAPE, _CLASSES, 0)
    network = with_noise(network, config.place, _SHAPE, 1).eval()
    first = FirstLayer(network, noise_layers(network)[0], lambda pixels: (pixels - 0.13) / 0.31, _SHAPE)
    return SmoothedNetwork(build_smoothing(config, first, _no_images).first, _CLASSES, 0)


def _no_images(wanted: int) -> tuple[Tensor, Tensor]:
    raise ValueError("even noise needs no public images")


if __name__ == "__main__":
    main()
