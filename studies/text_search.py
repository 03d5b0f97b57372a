"""The tables of docs/text-search.md: ``python -m studies text_search --attack text_map --noise gaussian:0.01``.

Each victim is a client with so many sentences of SST-2, each of 16 tokens, and uploads their gradient through an
untrained transformer. Every line of output is the mean over all sentences of all victims; seconds are CPU time of one
thread for each victim, with its share of the language model's training. Epsilon is proven for one upload, at delta
1e-5. ``picked``: the most probable of 100 sentences for the first of each batch, the others known, which no decision is
right more often than; a guess is right in 1 %, and the ceiling of that is printed, too. Ends with 1 if it is passed by
more than chance allows (1 %).
"""

import argparse
import csv
import gzip
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from scipy.stats import binom
from torch import Tensor

from fedpriv.accounting.ceiling import quick_ceiling
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, run_attack
from fedpriv.attacks.reconstruction.posterior import misfit
from fedpriv.attacks.reconstruction.upload_model import Victim, prepare_victims
from fedpriv.attacks.referee import Scores, public_guesses, score, score_guesses
from fedpriv.attacks.texts.scene import TextScene
from fedpriv.attacks.texts.scoring import Scorer, Texts, trained_network
from fedpriv.attacks.texts.soft import soft_network
from fedpriv.core.config import Experiment, validated
from fedpriv.core.errors import InputError
from fedpriv.core.lab.victims import UploadTarget, truth
from fedpriv.core.records import sentence_result
from fedpriv.core.registry import ATTACKS
from fedpriv.core.world import World, build_world
from fedpriv.data.source import data_folder
from studies.arguments import StudyParser, whole
from studies.leakage import FIRST, heard, mechanism_of

TOKENS = 16
LISTED = 100  # sentences from which one is picked
CHANCE = 0.01  # that a rate is above its ceiling by so much without an error


def main() -> None:
    """Print lines for each kind of noise, and one for each guess."""
    parser = StudyParser("studies.text_search", __doc__)
    parser.add_argument("--attack", choices=tuple(ATTACKS), default="text_map")
    parser.add_argument("--model", choices=("gpt", "encoder"), default="gpt")
    parser.add_argument("--set", nargs="*", type=_pair, default=[], help="KEY=VALUE of the attack")
    parser.add_argument("--batch", type=whole(1), default=1)
    parser.add_argument("--victims", type=whole(1), default=2)
    parser.add_argument("--depth", type=whole(1), default=2)
    parser.add_argument("--noise", nargs="+", default=["none"], help="none, gaussian:SIGMA or vmf:KAPPA")
    torch.set_num_threads(1)
    with parser.parsed() as options, tempfile.TemporaryDirectory() as folder:
        above = _measure(options, Path(folder) / "sst2.csv")
    sys.exit(int(above))


def scene_of(world: World, observations: tuple[Observation, ...]) -> tuple[TextScene, list[Victim]]:
    """Return what attacks on texts see, and the uploads as they take them."""
    public = observations[0].settings
    if public.text is None:
        raise ValueError("the uploads are not of texts")
    scene = TextScene.of(world.model, public.shape, public.classes, public.text, world.dataset.x_test)
    return scene, prepare_victims(observations, scene.names, scene.device)


def is_picked(scene: TextScene, victim: Victim, world: World, rows: Tensor) -> bool:
    """Whether the first sentence of a batch is the most probable of a list, the others of the batch known."""
    data = world.dataset
    texts = _texts(scene, data.x_train[rows], data.y_train[rows])
    others = _texts(scene, data.x_test[: LISTED - 1], data.y_test[: LISTED - 1])
    listed = Texts(torch.cat([texts.tokens[:1], others.tokens]), torch.cat([texts.labels[:1], others.labels]))
    soft = soft_network(trained_network(scene, victim), scene.format.vocabulary, "probabilities")
    scorer = Scorer(scene, victim, soft, misfit)
    return int(scorer.exchanged(texts, (0,), listed.tokens[:, None], listed.labels[:, None]).argmin()) == 0


def _texts(scene: TextScene, inputs: Tensor, targets: Tensor) -> Texts:
    """Sentences of a data set as attacks score them."""
    if not scene.is_next:
        return Texts(inputs.flatten(1).long(), targets)
    tokens = torch.cat([inputs.flatten(1).long(), targets[:, -1:]], dim=1)
    return Texts(tokens, torch.zeros(len(tokens), dtype=torch.int64))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=VALUE")
    return key, value


def _measure(options: argparse.Namespace, file: Path) -> bool:
    """Whether a rate was above its ceiling."""
    above = False
    settings = validated(ATTACKS[options.attack], dict(options.set), "--set")
    experiments = {noise: _experiment(options, noise, file) for noise in options.noise}
    _write(file, options.batch * options.victims)
    for noise, experiment in experiments.items():
        world = build_world(experiment)
        public = world.dataset.x_test.long()
        epsilon = world.plans[0].guarantee([FIRST]).epsilon
        about = f"{options.batch} | {noise} | {'nothing' if epsilon is None else f'{epsilon:.2g}'}"
        uploads = heard(world)
        truths = [truth(world, UploadTarget(FIRST, (client,))) for client in range(options.victims)]
        picked, limit = _picked(world, uploads)
        above = above or binom.sf(picked - 1, options.victims, limit) < CHANCE
        print(f"| {about} | picked {picked} of {options.victims} | ceiling {limit:.3f} |", flush=True)
        job = AttackJob(options.attack, uploads, world.model, settings, 1, public_images=public)
        began = time.process_time()
        try:
            made = run_attack(job)
        except AttackRefused as error:
            print(f"| {about} | {options.attack} | refused: {error} |", flush=True)
            continue
        seconds = (time.process_time() - began) / options.victims
        read = [score(one, "protected", known, (), (), 1.0) for one, known in zip(made, truths, strict=True)]
        _print(about, options.attack, read, f"{seconds:.1f}")
    for guess in public_guesses(public):
        if guess.pool is not None and options.batch == 1:
            continue
        _print(f"{options.batch} | any | ", guess.name, [score_guesses([guess], known, ()) for known in truths], "")
    return above


def _picked(world: World, observations: tuple[Observation, ...]) -> tuple[int, float]:
    """Sentences that were picked, and the ceiling of their share."""
    scene, victims = scene_of(world, observations)
    right = [is_picked(scene, victim, world, world.uploaded_rows(victim.client, FIRST)) for victim in victims]
    return sum(right), quick_ceiling(world.plans[0].accounted((FIRST,)), 1 / LISTED)


def _experiment(options: argparse.Namespace, noise: str, file: Path) -> Experiment:
    return validated(
        Experiment,
        {
            "name": "text-search",
            "data": {
                "name": "text",
                "path": str(file),
                "text": {
                    "label": "label",
                    "text": "sentence",
                    "tokenizer": "word",
                    "vocabulary": 4096,
                    "length": TOKENS,
                },
            },
            "model": {"name": options.model, "width": 256, "depth": options.depth, "heads": 4},
            "federation": {"clients": options.victims, "rounds": 1},
            "training": {"batch_size": options.batch},
            "mechanism": mechanism_of(noise),
            "adversary": {"attacks": [options.attack]},
        },
        "these arguments",
    )


def _write(file: Path, sentences: int) -> None:
    """The first training sentences that fill all tokens, each once, and all test sentences."""
    path = data_folder("") / "sst2.csv.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as source:
            rows = list(csv.DictReader(source))
        train = [row for row in rows if row["split"] == "train" and len(row["sentence"].split()) >= TOKENS]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, KeyError) as error:
        raise InputError(f"{path} is not SST-2 ({error}); FEDPRIV_DATA names the folder that has it") from error
    if len(train) < sentences:
        raise InputError(f"expected {sentences} sentences of {TOKENS} tokens, and {path} has {len(train)}")
    with file.open("w", encoding="utf-8", newline="") as target:
        writer = csv.DictWriter(target, ("sentence", "label", "split"))
        writer.writeheader()
        # Phrases of one sentence stand together: each so manyth is of another one.
        writer.writerows(train[:: len(train) // sentences][:sentences])
        writer.writerows(row for row in rows if row["split"] == "test")


def _print(about: str, attack: str, read: Sequence[Scores], seconds: str) -> None:
    result = sentence_result(line.words for each in read for line in each.scores if line.chosen)
    if result is None:
        raise ValueError("no sentence was attacked")
    figures = " | ".join(f"{value:.2f}" for value in (result.rouge1, result.rouge2, result.rouge_l))
    right = f"{result.share_right:.0%}"
    print(f"| {about} | {attack} | {figures} | {result.exact} | {right} | {seconds} |", flush=True)


if __name__ == "__main__":
    main()
