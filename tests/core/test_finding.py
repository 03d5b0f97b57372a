"""Findings are found by their folders, in one order, and each has its section of the report."""

import io
import math
from importlib import resources

import numpy as np
import pytest
import torch
from PIL import Image

from fedpriv.core.finding import Columns, Finding, findings, png


def test_each_has_a_rank_of_its_own_and_a_section_in_its_folder() -> None:
    every = findings()
    ranks = [finding.rank for finding in every]
    assert ranks == sorted(set(ranks))
    for finding in every:
        if type(finding).section is Finding.section:
            continue  # its sentences say all
        folder = resources.files(type(finding).__module__.rpartition(".")[0])
        assert '<section aria-labelledby="' in folder.joinpath("report.html").read_text(encoding="utf-8")


def test_columns_of_trials_have_defaults_and_no_name_twice() -> None:
    kinds = [finding.columns for finding in findings() if finding.columns is not None]
    names = [name for kind in kinds for name in kind.model_fields]
    assert len(names) == len(set(names))
    assert all(isinstance(kind(), Columns) and not kind().alarm for kind in kinds)


@pytest.mark.parametrize("channels", [2, 4, 13])
def test_channels_that_are_no_colours_are_grey_tiles(channels: int) -> None:
    """Each band is where reading order puts it, byte for byte."""
    bands = np.random.default_rng(channels).integers(256, size=(channels, 3, 5), dtype=np.uint8)
    with Image.open(io.BytesIO(png(torch.from_numpy(bands) / 255))) as drawn:
        pixels = np.asarray(drawn)
    across = pixels.shape[1] // 5
    tiles = [pixels[3 * (at // across) :, 5 * (at % across) :][:3, :5] for at in range(channels)]
    np.testing.assert_array_equal(tiles, bands)
    assert across == math.ceil(channels**0.5)
