"""Run folders as a run leaves them: real digits, real scores of noisy copies, a real ledger."""

import io
import json
import math
import statistics
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits

from fedpriv.accounting import Ledger, LedgerLine, Release, guarantee
from fedpriv.attacks.metrics import mse, psnr, ssim
from fedpriv.core.config import Experiment

LPIPS_REASON = "the weights of squeezenet are not in torch's hub folder"
NOISE = {"none": None, "gaussian": "sigma", "vmf": "kappa"}


@dataclass(frozen=True)
class Recipe:
    """What the example run is like."""

    title: str = "Digits behind Gaussian noise"
    clients: int = 8
    rounds: int = 20
    finished: int = 20
    mechanism: str = "gaussian"
    noise: float = 1.2
    sampling: str = "poisson"
    algorithm: str = "fedsgd"
    attacks: tuple[str, ...] = ("dlg", "iga")
    victims: int = 4
    images: int = 1
    pictures: int = 16
    unprotected_error: float = 0.02
    protected_error: float = 1.5
    success_ssim: float = 0.6
    counterfactual: bool = True
    lpips: bool = False
    padded: bool = False
    class_names: tuple[str, ...] = tuple(str(digit) for digit in range(10))
    failures: tuple[tuple[int, int, str], ...] = ((7, 3, "ConnectionError: the client went away"), (12, 0, "timed out"))
    warnings: tuple[str, ...] = ("layer conv1 (ReLU) has no useful second derivative; dlg will mostly fail",)
    note: str = ""
    status: str = "completed"
    reason: str | None = None
    target: float | None = None
    stops: tuple[tuple[int, int], ...] = ()
    running: bool = True


def experiment_of(recipe: Recipe) -> Experiment:
    mechanism: dict[str, Any] = {"name": recipe.mechanism}
    key = NOISE[recipe.mechanism]
    if key:
        mechanism[key] = recipe.noise
    return Experiment.model_validate(
        {
            "name": "digits-example",
            "seed": 7,
            "data": {"name": "digits", "partition": "dirichlet", "alpha": 0.5},
            "model": {"name": "lenet", "init": "uniform"},
            "federation": {
                "clients": recipe.clients,
                "rounds": recipe.rounds,
                "algorithm": recipe.algorithm,
                **({"target_epsilon": recipe.target} if recipe.target else {}),
            },
            "training": {"batch_size": 1, "sampling": recipe.sampling},
            "mechanism": mechanism,
            "adversary": {
                "attacks": recipe.attacks,
                "victims": recipe.victims,
                "success_ssim": recipe.success_ssim,
                "counterfactual": recipe.counterfactual,
            },
            "report": {"title": recipe.title, "pictures": recipe.pictures},
        }
    )


def build_run(folder: Path, recipe: Recipe) -> Path:
    """Write the folder of an example run; a function of the recipe alone."""
    rng = np.random.default_rng(0)
    (folder / "reconstructions").mkdir(parents=True)
    (folder / "observations").mkdir()
    (folder / "config.toml").write_text(experiment_of(recipe).to_toml(), encoding="utf-8")
    (folder / "command.txt").write_text("fedpriv run configs/digits.toml --set seed=7\n", encoding="utf-8")
    shares = rng.dirichlet(np.full(len(recipe.class_names), 0.7), recipe.clients)
    counts = [rng.multinomial(140 + 5 * (client % 9), share) for client, share in enumerate(shares)]
    partition = {
        "partition": "dirichlet",
        "class_names": list(recipe.class_names),
        "clients": [[int(number) for number in row] for row in counts],
    }
    (folder / "referee").mkdir()
    write_json(folder / "referee" / "partition.json", partition)
    records = _metrics(recipe)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    ledger = _ledger(recipe).to_json()
    write_json(folder / "ledger.json", ledger)
    scores, pictures = _attack(_about_attacks(recipe))
    for name, picture in pictures.items():
        (folder / "reconstructions" / name).write_bytes(picture)
    lines = "".join(json.dumps(score) + "\n" for score in scores)
    (folder / "reconstructions" / "scores.jsonl").write_text(lines, encoding="utf-8")
    write_json(folder / "summary.json", _summary(recipe, records, ledger, scores))
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _metrics(recipe: Recipe) -> list[dict[str, Any]]:
    everyone = list(range(recipe.clients))
    records = []
    for number in range(recipe.finished + 1):
        failed = [{"client": client, "reason": reason} for at, client, reason in recipe.failures if at == number]
        gone = {failure["client"] for failure in failed}
        records.append(
            {
                "round": number,
                "loss": 0.31 + 2.0 * 0.82**number,
                "accuracy": 0.913 - 0.81 * 0.8**number,
                "clients": everyone if number else [],
                "used": [client for client in everyone if client not in gone] if number else [],
                "failures": failed,
                "seconds": 0.73,
                "bytes_up": 63_304 * recipe.clients if number else 0,
                "bytes_down": 63_304 * recipe.clients if number else 0,
                # Folders of older versions have no such key.
                **({"epsilon": None if recipe.mechanism == "none" else 0.4 * number} if recipe.running else {}),
            }
        )
    return records


_guarantee = cache(guarantee)


def _ledger(recipe: Recipe) -> Ledger:
    mechanism = recipe.mechanism
    releases = [
        Release(
            mechanism=mechanism,
            unit="example",
            sampling=recipe.sampling,
            rate=1 / (140 + 5 * (client % 9)),
            participations=recipe.finished,
            dimensions=(15_826,),
            noise=None if mechanism == "none" else recipe.noise,
            delta=1e-5,
        )
        for client in range(recipe.clients)
    ]
    entries = [
        LedgerLine.of(client, 140 + 5 * (client % 9), _guarantee(release)) for client, release in enumerate(releases)
    ]
    key = NOISE[mechanism]
    return Ledger.of("example", mechanism, {key: recipe.noise, "clip_norm": 1.0} if key else {}, entries)


def _about_attacks(recipe: Recipe) -> Recipe:
    """The recipe without what has no part in the attacks."""
    return replace(
        Recipe(),
        attacks=recipe.attacks,
        victims=recipe.victims,
        images=recipe.images,
        unprotected_error=recipe.unprotected_error if recipe.counterfactual or recipe.mechanism == "none" else math.nan,
        protected_error=recipe.protected_error if recipe.mechanism != "none" else math.nan,
        success_ssim=recipe.success_ssim,
        lpips=recipe.lpips,
        padded=recipe.padded,
        note=recipe.note,
    )


@cache
def _attack(recipe: Recipe) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return the lines of scores.jsonl and the pictures by name; a reconstruction is the original with noise."""
    if not recipe.attacks:
        return [], {}
    rng = np.random.default_rng(1)
    pictures: dict[str, bytes] = {}
    digits = load_digits()
    images = digits.images / 16.0
    mean = images[1000:].mean(axis=0)
    uploads = {"unprotected": recipe.unprotected_error, "protected": recipe.protected_error}
    uploads = {upload: error for upload, error in uploads.items() if not math.isnan(error)}
    guesses = {"guess-mean": mean, "guess-grey": np.full_like(mean, 0.5)}
    for name, guess in guesses.items():
        pictures[f"{name}.png"] = png(guess)
    lines = []
    for victim in range(recipe.victims):
        for image in range(recipe.images):
            place = {"round": 1, "client": victim, "image": image}
            stem, end = f"0001-{victim:04d}", f"-{image}.png" if recipe.images > 1 else ".png"
            index = 11 * victim + image
            original, label = images[index], int(digits.target[index])
            bar = min(float(mse(_stack(original), _stack(guess))) for guess in guesses.values())
            pictures[f"{stem}-original{end}"] = png(original)
            for attack in recipe.attacks:
                for upload, error in uploads.items():
                    found = np.clip(original + error * rng.standard_normal(original.shape), 0, 1)
                    pictures[f"{stem}-{attack}-{upload}{end}"] = png(found)
                    guessed = label if upload == "unprotected" else (label + 5) % 10
                    lines.append(_score(recipe, place, attack, upload, original, found, label, guessed, bar))
                    lost = np.clip(original + 2 * rng.standard_normal(original.shape), 0, 1)
                    worse = _score(recipe, place, attack, upload, original, lost, label, guessed, bar)
                    lines.append({**worse, "restart": 1, "chosen": False, "loss": 5.0})
            for attack, guess in guesses.items():
                line = _score(recipe, place, attack, "none", original, guess, label, None, 0.0)
                lines.append({**line, "restart": 0, "loss": None})
    return lines, pictures


def _score(
    recipe: Recipe,
    place: dict[str, int],
    attack: str,
    upload: str,
    original: np.ndarray,
    found: np.ndarray,
    label: int,
    guessed: int | None,
    bar: float,
) -> dict[str, Any]:
    truth, picture = _stack(original), _stack(found)
    similarity, error = float(ssim(truth, picture)), float(mse(truth, picture))
    return {
        **place,
        "attack": attack,
        "upload": upload,
        "restart": 0,
        "chosen": True,
        "loss": 0.001,
        "label": guessed,
        "true_label": label,
        "label_correct": None if guessed is None else guessed == label,
        "mse": error,
        "mse_normalised": float(mse(truth / 0.38, picture / 0.38)),
        "psnr": float(psnr(truth, picture)),
        "ssim": similarity,
        "lpips": abs(1 - similarity) / 2 if recipe.lpips else None,
        "recovered": similarity >= recipe.success_ssim and error < bar,
        "note": recipe.note if attack == "iga" else "",
        **({"ssim_padded": similarity - 0.25} if recipe.padded else {}),
    }


def _stack(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image)[None, None]


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray((255 * image).round().astype(np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def _summary(
    recipe: Recipe, records: list[dict[str, Any]], ledger: dict[str, Any], scores: list[dict[str, Any]]
) -> dict[str, Any]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for score in scores:
        if score["chosen"]:
            groups.setdefault((score["attack"], score["upload"]), []).append(score)
    worst = {key: value for key, value in ledger["worst"].items() if key not in ("client", "examples", "noise")}
    return {
        "name": "digits-example",
        "status": recipe.status,
        "reason": recipe.reason,
        "rounds": records[-1]["round"],
        "test_accuracy": records[-1]["accuracy"],
        "test_loss": records[-1]["loss"],
        "ledger": worst,
        "stops": [
            {"client": client, "round": number, "epsilon": 7.5, "next_epsilon": 8.1} for client, number in recipe.stops
        ],
        "attacks": [_result(recipe, *key, group) for key, group in groups.items()],
        "seconds": 192.4,
        "verdict": _verdict(recipe, records[-1], worst, scores),
        "warnings": list(recipe.warnings),
        "versions": {"python": "3.11.9", "fedpriv": "0.1.0", "torch": "2.9.0", "flwr": "1.41.0"},
        "data": {"name": "digits", "source": "scikit-learn's load_digits, embedded"},
        "model": {"name": "lenet", "parameters": 15_826},
        "threat_model": {
            "name": "honest-but-curious-server",
            "listener": "the server, or anyone who reads its uploads in clear text",
            "sees": ["the parameters sent to the clients before the round", "each client's upload"],
            "knows": ["the network's architecture and loss", "the privacy mechanism and its parameters"],
            "withheld": ["the images", "the labels", "every random seed"],
            "conduct": "passive: it follows the protocol and only listens",
        },
        "device": "cpu",
        "engine": "inline",
        "command": "fedpriv run configs/digits.toml --set seed=7",
    }


def _verdict(recipe: Recipe, last: dict[str, Any], worst: dict[str, Any], scores: list[dict[str, Any]]) -> list[str]:
    sentences = []
    for upload in ("unprotected", "protected"):
        tried = {(s["client"], s["image"]): False for s in scores if s["upload"] == upload}
        hits = {(s["client"], s["image"]) for s in scores if s["upload"] == upload and s["chosen"] and s["recovered"]}
        if tried:
            sentences.append(f"From {upload} uploads the eavesdropper recovers {len(hits)} of {len(tried)} images.")
    sentences.append(
        f"After {last['round']} rounds the model classifies {last['accuracy']:.1%} of the test data correctly."
    )
    if worst["epsilon"] is not None:
        sentences.append(f"Proven for the whole run: epsilon {worst['epsilon']:.4g} at delta {worst['delta']:g}.")
    return sentences


def _result(recipe: Recipe, attack: str, upload: str, group: list[dict[str, Any]]) -> dict[str, Any]:
    labels = [score["label_correct"] for score in group if score["label_correct"] is not None]
    perceptual = [score["lpips"] for score in group if score["lpips"] is not None]
    medians = {
        name: statistics.median(score[name] for score in group)
        for name in ("mse", "mse_normalised", "psnr", "ssim", *(["ssim_padded"] if recipe.padded else []))
    }
    return {
        "attack": attack,
        "upload": upload,
        "victims": len(group),
        "recovered": sum(score["recovered"] for score in group),
        "success_ssim": recipe.success_ssim,
        **medians,
        "lpips": statistics.median(perceptual) if perceptual else None,
        "lpips_reason": None if perceptual else LPIPS_REASON,
        "label_accuracy": sum(labels) / len(labels) if labels else None,
    }
