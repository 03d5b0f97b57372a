"""How fast pictures in folders and Parquet are read, compared with torchvision's ImageFolder with one worker.

The pictures are random. Ours read them in a process of their own. Their peak of memory is beyond that of imports, as a
multiple of the tensors.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.measure import in_own_process, options, report, save, seconds
from fedpriv.core.config import DataConfig
from fedpriv.core.files import TICK
from fedpriv.data.datasets import load_dataset
from fedpriv.diagnosis.cost import peak_mib, reset_peak
from studies.arguments import whole

_CLASSES = 10
_WAYS = ("torchvision, one worker", "torchvision, no worker", "folder", "folder, kept", "hub", "hub, kept")


def main() -> None:
    """Measure and print."""
    parser = options("reading", __doc__)
    parser.add_argument("--pictures", type=whole(100), default=50_000)
    parser.add_argument("--side", type=whole(1), default=28, help="pixels on each side")
    with parser.parsed() as asked, tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _write(root, asked.pictures, asked.side)
        _write(root / "warm-up", 100, asked.side)
        os.environ["FEDPRIV_CACHE"] = str(root / "kept")  # each form is read there first, and then found
        time.sleep(1.1 * TICK / 1e9)  # files that changed just now are not kept
        # A worker of torchvision is a child, which a process of its own may not have.
        rows = [_measured(way, root) if "worker" in way else in_own_process(_measured, way, root) for way in _WAYS]
        for row in rows:
            row["ratio"] = rows[0]["seconds"] / row["seconds"]
        report(
            {
                "way": "{way}",
                "seconds": "{seconds:.2f}",
                "times as fast": "{ratio:.1f}",
                "peak / tensors": "{peak:.2f}",
            },
            rows,
        )
        save(asked.json, pictures=asked.pictures, side=asked.side, rows=rows)


def _write(root: Path, pictures: int, side: int) -> None:
    """The same pictures as files of classes in train and test, and as Parquet."""
    import datasets

    draw = np.random.default_rng(0)
    base = draw.integers(0, 128, (_CLASSES, side, side, 3))
    contents: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for number in range(pictures):
        label, part = number % _CLASSES, "test" if number % 10 == 9 and number // 10 % 5 == 0 else "train"
        path = root / "folder" / part / str(label) / f"{number:06}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((base[label] + draw.integers(0, 128, (side, side, 3))).astype(np.uint8)).save(path)
        contents[part].append({"image": {"bytes": path.read_bytes(), "path": path.name}, "label": label})
    names = datasets.ClassLabel(names=[str(label) for label in range(_CLASSES)])
    features = datasets.Features({"image": datasets.Image(), "label": names})
    for part, rows in contents.items():
        (root / "hub").mkdir(exist_ok=True)
        datasets.Dataset.from_list(rows, features).to_parquet(root / "hub" / f"{part}.parquet")


def _measured(way: str, root: Path) -> dict[str, Any]:
    read = _torchvision if way.startswith("torchvision") else _ours
    read(way, root / "warm-up")
    before = reset_peak()
    held: list[int] = []
    taken = seconds(lambda: held.append(read(way, root)))
    return {"way": way, "seconds": taken, "peak": (peak_mib() - before) / (held[0] / 2**20)}


def _torchvision(way: str, root: Path) -> int:
    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import PILToTensor

    read = 0
    for part in ("train", "test"):
        loader = torch.utils.data.DataLoader(
            ImageFolder(str(root / "folder" / part), PILToTensor()), 256, num_workers=int(way.endswith("one worker"))
        )
        read += sum(images.nbytes for images, _ in loader)
    return read


def _ours(way: str, root: Path) -> int:
    form = way.split(",")[0]
    dataset = load_dataset(DataConfig(name=form, path=str(root / form)), 0)
    return dataset.x_train.nbytes + dataset.x_test.nbytes


if __name__ == "__main__":
    main()
