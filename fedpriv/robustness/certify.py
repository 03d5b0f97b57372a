"""Certificates of a run's final model, added to its folder: what no perturbation up to a size can change of votes."""

import shlex
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.errors import InputError
from fedpriv.core.files import writing
from fedpriv.core.finished import completed_summary, finished_world
from fedpriv.core.progress import Progress
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World
from fedpriv.robustness.build import certified_rows
from fedpriv.robustness.certificates import hoeffding_bounds, margins, vote_bounds, wrong_at_most
from fedpriv.robustness.norms import LayerNorms
from fedpriv.robustness.records import (
    BOUNDS,
    Certificate,
    CertifiedCurve,
    Reach,
    Robustness,
    mean_radius,
    read_attempts,
    read_certificates,
    remove_certificates,
    write_certificates,
)
from fedpriv.robustness.settings import LEAST_NOISE, MOST_NOISE, CertifyConfig
from fedpriv.robustness.smoothed import SmoothedModel, pixel_images, smoothed_model, write_noise

# Numbers to draw from which on the time is told before; about 4e7 are drawn in a second.
_MANY = 2e10
_PER_SECOND = 4e7
_AT_ONCE = 10


def certify_run(folder: RunFolder, config: CertifyConfig, afterwards: float | None, progress: Progress) -> Robustness:
    """Certify a run's final model on test images. It returns what is written to robustness.json."""
    began = time.monotonic()
    summary = completed_summary(folder)
    # Whoever has damaged ones may want to look at them first.
    read_certificates(folder)
    read_attempts(folder)
    experiment = folder.experiment()
    world = finished_world(folder, experiment)
    with cpu_threads(experiment.engine.threads):
        model = smoothed_model(folder, world, afterwards)
        there = len(world.dataset.y_test)
        rows = certified_rows(experiment.seed, there, config.among(there - model.public), model.public)
        _tell_time(model, len(rows), config, progress)
        progress.stage(f"certifying {len(rows)} examples with {config.selection} + {config.votes} votes")
        norms = model.norms()
        certificates = _certificates(world, model, torch.from_numpy(rows), config, norms, progress)
        noiseless = _noiseless(world, model, torch.from_numpy(rows))
    robustness = _robustness(model, norms, config, certificates, noiseless, time.monotonic() - began)
    again = ["fedpriv", "certify", str(folder.path), "--examples", str(len(rows)), "--votes", str(config.votes)]
    with writing(shlex.join(again)):
        (folder.path / "robustness").mkdir(exist_ok=True)
        remove_certificates(folder)
        write_noise(folder, model)
        write_certificates(folder, robustness, certificates)
        folder.write_summary(summary.with_found({"robustness": robustness, "evasion": None}))
    return robustness


def certificate(
    image: int, label: int, chosen: int, counts: Sequence[int], config: CertifyConfig, norms: LayerNorms
) -> Certificate:
    """Return the certificate of one image."""
    bounds = vote_bounds(counts, chosen, config.alpha, config.rivals)
    proven = margins(bounds, hoeffding_bounds(counts, chosen, config.alpha))
    return Certificate(
        image=image,
        label=label,
        predicted=chosen,
        count=counts[chosen],
        votes=sum(counts),
        runner_up=max(count for number, count in enumerate(counts) if number != chosen),
        lower=bounds.lower,
        upper=bounds.upper,
        margins=proven,
        radius_l2=proven["main"] / norms.l2,
        radius_linf=proven["main"] / norms.linf,
    )


def _certificates(
    world: World, model: SmoothedModel, rows: Tensor, config: CertifyConfig, norms: LayerNorms, progress: Progress
) -> list[Certificate]:
    certificates: list[Certificate] = []
    for chunk in rows.split(_AT_ONCE):
        images, numbers = pixel_images(world, chunk), chunk.tolist()
        chosen = model.network.votes(images, config.selection, "robustness-selection", numbers).argmax(dim=1).tolist()
        counts = model.network.votes(images, config.votes, "robustness-votes", numbers).tolist()
        labels = world.dataset.y_test[chunk].tolist()
        for row, label, first, votes in zip(numbers, labels, chosen, counts, strict=True):
            certificates.append(certificate(row, label, first, votes, config, norms))
        progress.advanced("images", len(certificates), len(rows))
    return certificates


def _noiseless(world: World, model: SmoothedModel, rows: Tensor) -> int:
    """How many images the model gets right without noise."""
    right = 0
    for chunk in rows.split(_AT_ONCE):
        predictions = model.network.predictions(pixel_images(world, chunk))
        right += int((predictions == world.dataset.y_test[chunk]).sum())
    return right


def _robustness(
    model: SmoothedModel,
    norms: LayerNorms,
    config: CertifyConfig,
    certificates: Sequence[Certificate],
    noiseless: int,
    seconds: float,
) -> Robustness:
    sizes = {"l2": config.radii_l2, "linf": config.radii_linf}
    return Robustness(
        noise=model.noise,
        norms=norms,
        examples=len(certificates),
        selection=config.selection,
        votes=config.votes,
        alpha=config.alpha,
        rivals=config.rivals,
        wrong_at_most=wrong_at_most(len(certificates), config.alpha),
        voted=rate_interval(sum(each.right for each in certificates), len(certificates)),
        noiseless=rate_interval(noiseless, len(certificates)),
        abstained=sum(each.abstains for each in certificates),
        curves=tuple(_curve(certificates, norm, bound, sizes[norm]) for norm in sizes for bound in BOUNDS),
        radii=tuple(mean_radius(certificates, bound) for bound in BOUNDS),
        reach=_reach(model.network.classes, config, norms),
        seconds=seconds,
    )


def _reach(classes: int, config: CertifyConfig, norms: LayerNorms) -> Reach:
    """The radii of an image that all votes agree on."""
    best = certificate(0, 0, 0, [config.votes] + [0] * (classes - 1), config, norms)
    return Reach(best.radius_l2, best.radius_linf)


def _curve(certificates: Sequence[Certificate], norm: str, bound: str, sizes: tuple[float, ...]) -> CertifiedCurve:
    held = [sum(each.holds(norm, size, bound) for each in certificates) for size in sizes]
    return CertifiedCurve(norm, bound, sizes, tuple(rate_interval(count, len(certificates)) for count in held))


def _tell_time(model: SmoothedModel, examples: int, config: CertifyConfig, progress: Progress) -> None:
    numbers = model.noise.dimension * examples * (config.selection + config.votes)
    if numbers > _MANY:
        progress.warn(
            f"{numbers:.1g} random numbers are needed, which take {numbers / _PER_SECOND / 60:.0f} minutes or more "
            "on one core: lower --examples or --votes, or use robustness.place = 'input'"
        )


def check_noise(noise: float | None, place: str | None) -> None:
    """Refuse options of noise that is added afterwards and cannot be."""
    if noise is None and place is not None:
        raise InputError(f"--place {place} is for --noise; without it the run's own noise is certified")
    if place not in (None, "input"):
        raise InputError(
            key="--place", given=place, allowed="noise that is added afterwards goes on the input; allowed: input"
        )
    if noise is not None and not LEAST_NOISE <= noise <= MOST_NOISE:
        raise InputError(
            key="--noise",
            given=noise,
            allowed=f"expected a deviation from {LEAST_NOISE:g} to {MOST_NOISE:g}, for inputs from 0 to 1",
        )
