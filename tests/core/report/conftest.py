"""What the tests of the report share: a maker of run folders, and a browser."""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser, find_chromium
from example_runs import Recipe, build_run

from fedpriv.core.report import page


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], Path]:
    """Build the folder of each recipe once."""
    root = tmp_path_factory.mktemp("runs")

    @cache
    def original(recipe: Recipe) -> Path:
        return build_run(root / str(len(list(root.iterdir()))), recipe)

    return original


@pytest.fixture
def make_run(tmp_path: Path, originals: Callable[[Recipe], Path]) -> Callable[..., Path]:
    """Make a run folder from keyword arguments of Recipe; the test may change it."""

    def make(**changes: Any) -> Path:
        copy = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        return Path(shutil.copytree(originals(Recipe(**changes)), copy))

    return make


@pytest.fixture(scope="session", autouse=True)
def _each_plot_once() -> Iterator[None]:
    """Draw the same plot once a session: that drawing repeats is tested in test_report_figures.py."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("accuracy_plot", "loss_plot", "epsilon_plot", "partition_plot"):
            patch.setattr(page, name, cache(getattr(page, name)))
        yield


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = find_chromium()
    if binary is None:
        pytest.skip("no Chromium on the path; set CHROMIUM to its binary")
    chromium = Browser(binary, tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()
