"""Attack what a tap has recorded of a user's own Flower app.

The attack is given an observation and the network's code. What the client trained on lies apart, and is only read to
score what came of it; other clients' images are what a guess is made of, and among them an original is to be picked.
"""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import save
from torch import Tensor, nn

from fedpriv.attacks.baselines import GREY, Guess, guesses
from fedpriv.attacks.observation import OTHERS, Observation, list_observations, read_observation
from fedpriv.attacks.own_model import reconstruct
from fedpriv.attacks.reconstruction import Reconstruction
from fedpriv.attacks.referee import score, score_guesses
from fedpriv.attacks.truth import Truth
from fedpriv.core.config import AdversaryConfig, parse_override
from fedpriv.core.errors import InputError
from fedpriv.core.files import write_whole, writing
from fedpriv.core.finding import png
from fedpriv.core.lab.results import attack_results
from fedpriv.core.progress import Progress
from fedpriv.core.records import AttackResult, LedgerLine, Score, read_file, shown_epsilon
from fedpriv.core.registry import ATTACKS
from fedpriv.flower.arrays import Form
from fedpriv.flower.folder import (
    BASE,
    LEDGER,
    TRUTH,
    Exchange,
    Tapped,
    TrainedOn,
    built,
    imported,
    read_arrays,
    read_exchanges,
    read_tapped,
    read_truth,
)
from fedpriv.flower.uploads import revealed
from fedpriv.flower.watch import MOST_IMAGES
from fedpriv.mechanisms import recorded_mechanism

_RESULT, _LINE = "attacks.json", TypeAdapter(LedgerLine)
_HOLDS: Mapping[Form, str] = {
    "weights": "the parameters after training",
    "update": "the update, parameters after minus before",
    "negated update": "the update, parameters before minus after",
    "gradient": "a gradient",
}
_NO_LPIPS = "not computed for a tap's pictures"


@dataclass(frozen=True)
class TappedSummary:
    """attacks.json: what came of all attacks of one command."""

    attacks: tuple[AttackResult, ...]  # one row for each attack, and for each guess
    verdict: tuple[str, ...]  # guess, measured and proven, in sentences
    warnings: tuple[str, ...]  # what makes an attack mean less than it seems to
    # of each attack on each upload, originals above what was made of them; paths in the folder
    pictures: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _TappedUpload:
    """An observation, with what only the laboratory has."""

    observation: Observation
    known: TrainedOn | None
    line: LedgerLine | None
    exchange: Exchange | None  # `None`: in the folder of an earlier version

    @property
    def name(self) -> str:
        """As users name it."""
        summed = self.exchange is not None and self.exchange.summed
        return f"{self.observation.round}-{'sum' if summed else self.observation.client}"


def attack_tapped(
    folder: Path, names: Sequence[str], victims: Sequence[str], overrides: Sequence[str], progress: Progress
) -> TappedSummary:
    """Attack the uploads in the folder of a tap, and write pictures and attacks.json there."""
    tapped = read_tapped(folder)
    if tapped is None:
        raise InputError(f"{folder} is not the folder of a tap")
    settings = _settings(overrides, names)
    chosen = tuple(names) or tuple(settings) or ("iga",)
    exchanges = read_exchanges(folder)
    everything = _heard(folder, exchanges)
    if not (everything or exchanges):
        raise InputError(f"{folder} holds no observations: the clients' logs say why")
    wanted = _chosen(everything, exchanges, victims, folder)
    heard = wanted if tapped.model is not None else ()
    told: list[str] = []
    scores: list[Score] = []
    pictures: list[str] = []
    for upload in heard:
        judge = _truth(upload, everything)
        for name in chosen:
            progress.stage(f"{name} on {upload.observation.title}")
            reconstruction, remarks = _attacked(tapped, folder, upload, name, settings.get(name, {}))
            told += remarks
            pictures.append(_pictured(folder, reconstruction, judge, name))
            if judge is not None:
                scores += _scored(reconstruction, upload, judge, name)
        if judge is not None:
            std = upload.observation.settings.std
            scores += score_guesses(_offers(judge), judge, std, perceptual=False).scores
    for text in dict.fromkeys(told):
        progress.warn(text)
    results = attack_results(scores, AdversaryConfig().success_ssim, _NO_LPIPS)
    attacked = {upload.exchange.stem for upload in heard if upload.exchange is not None}
    summed = {upload.observation.round for upload in heard if upload.exchange is not None and upload.exchange.summed}
    left = [each for each in exchanges if each.stem not in attacked and not (each.summed and each.round in summed)]
    others = [each for each in left if not victims or each.name in victims]
    looked = _looked_at(folder, others, everything)
    if tapped.model is None and wanted:
        looked += (f"Gradient attacks fit {', '.join(each.name for each in wanted)}: tap.model names the network.",)
    verdict = (*looked, *_forms(heard), *_measured(results, heard), *([_proven(heard)] if heard else []))
    summary = TappedSummary(results, verdict, tuple(dict.fromkeys(told)), tuple(pictures))
    with writing(""):
        write_whole(folder / _RESULT, f"{json.dumps(asdict(summary), indent=2, allow_nan=False)}\n".encode())
    return summary


def _settings(overrides: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Settings by attack."""
    settings: dict[str, dict[str, Any]] = {}
    for text in overrides:
        keys, value = parse_override(text)
        if len(keys) != 3 or keys[0] != "adversary" or keys[1] not in ATTACKS or (names and keys[1] not in names):
            raise InputError(
                key="--set",
                given=".".join(keys),
                allowed="of a tap's folder adversary.NAME.KEY of an attack may be set",
            )
        settings.setdefault(keys[1], {})[keys[2]] = value
    return settings


def _heard(folder: Path, exchanges: Sequence[Exchange]) -> tuple[_TappedUpload, ...]:
    by_stem, uploads = {exchange.stem: exchange for exchange in exchanges}, []
    for path in list_observations(folder / "observations"):
        known = read_truth(folder / TRUTH / path.name)
        line = read_file(folder / LEDGER / f"{path.stem}.json", _LINE)
        uploads.append(_TappedUpload(read_observation(path), known, line, by_stem.get(path.stem)))
    masked = [upload for upload in uploads if upload.exchange is not None and upload.exchange.summed]
    rounds = dict.fromkeys(upload.observation.round for upload in masked)
    sums = [_sum([upload for upload in masked if upload.observation.round == number]) for number in rounds]
    return (*(upload for upload in uploads if upload not in masked), *sums)


def _sum(uploads: Sequence[_TappedUpload]) -> _TappedUpload:
    """What the server has of uploads that secure aggregation adds up: their mean, weighted by examples.

    It is attacked as that of one client with all batches, which it is exactly for one step and equal weights.
    """
    weights, first = [_weight(upload.exchange) for upload in uploads], uploads[0]
    pairs = [
        (weight / sum(weights), upload.observation.upload) for weight, upload in zip(weights, uploads, strict=True)
    ]
    mean = {
        name: torch.stack([share * sent[name] for share, sent in pairs]).sum(0) for name in first.observation.upload
    }
    public = [upload.observation.settings for upload in uploads]
    settings = replace(
        public[0],
        batch_size=sum(each.batch_size or 1 for each in public),
        client_examples=sum(each.client_examples for each in public),
    )
    kept = [upload.known for upload in uploads if upload.known is not None]
    known = None
    if len(kept) == len(uploads):
        known = TrainedOn(torch.cat([each.images for each in kept]), torch.cat([each.labels for each in kept]))
    lines = [upload.line for upload in uploads if upload.line is not None]
    line = min(lines, key=lambda each: each.badness) if len(lines) == len(uploads) else None
    exchange = replace(first.exchange, clients=len(uploads)) if first.exchange is not None else None
    return _TappedUpload(replace(first.observation, upload=mean, settings=settings), known, line, exchange)


def _weight(exchange: Exchange | None) -> float:
    """How many examples a reply says that it is made of."""
    records = exchange.replied.values() if exchange is not None else ()
    counts = (record.get(key) for record in records for key in ("num_examples", "num-examples"))
    return next((float(count) for count in counts if isinstance(count, int) and count > 0), 1.0)


def _chosen(
    uploads: Sequence[_TappedUpload], exchanges: Sequence[Exchange], victims: Sequence[str], folder: Path
) -> tuple[_TappedUpload, ...]:
    names = dict.fromkeys([*(upload.name for upload in uploads), *(exchange.name for exchange in exchanges)])
    if wrong := [name for name in victims if name not in names]:
        raise InputError(f"victim {wrong[0]}: not in {folder}; heard (as ROUND-CLIENT): {', '.join(names)}")
    return tuple(upload for upload in uploads if not victims or upload.name in victims)


def _looked_at(folder: Path, others: Sequence[Exchange], uploads: Sequence[_TappedUpload]) -> tuple[str, ...]:
    """What replies reveal that no gradient attack was made on: the first of each type, or all if they are few."""
    observations = {each.exchange.stem: each.observation for each in uploads if each.exchange is not None}
    firsts = {exchange.type: exchange for exchange in reversed(others)}
    shown = others if len(others) <= 3 else [each for each in others if each is firsts[each.type]]
    lines: list[str] = []
    for exchange in shown:
        found = revealed(folder, exchange, observations.get(exchange.stem))
        lines += found.sentences
        if found.inputs is not None:
            path = f"reconstructions/{exchange.stem}-inputs.safetensors"
            with writing(""):
                (folder / "reconstructions").mkdir(exist_ok=True, mode=0o700)
                write_whole(folder / path, save({"inputs": found.inputs}))
            lines.append(f"{exchange.title}: these inputs are in {path}.")
    if len(shown) < len(others):
        lines.append(f"{len(others) - len(shown)} further replies are not shown: --victim ROUND-CLIENT shows one.")
    return tuple(lines)


def _attacked(
    tapped: Tapped, folder: Path, upload: _TappedUpload, name: str, settings: Mapping[str, Any]
) -> tuple[Reconstruction, list[str]]:
    """Reconstruct, and say what makes that mean less."""
    observation = _as_of_one_rate(upload.observation, upload.exchange)
    public = observation.settings
    if public.examples > MOST_IMAGES:
        raise InputError(
            f"{observation.title} is made of {public.examples} images; attacked are uploads of {MOST_IMAGES} at most: "
            "tap a round with fewer local steps or smaller batches"
        )
    network = _network(tapped, folder, observation)
    rate = None if public.algorithm == "fedsgd" else public.learning_rate
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reconstruction = reconstruct(
            network,
            imported(tapped, tapped.loss),
            observation.upload,
            public.shape,
            attack=name,
            classes=public.classes,
            batch_size=public.batch_size or 1,
            examples=public.examples,
            parameters=observation.parameters,
            mechanism=recorded_mechanism(public.mechanism),
            learning_rate=rate,
            local_steps=public.local_steps,
            optimizer=public.optimizer,
            momentum=public.momentum,
            mean=public.mean,
            std=public.std,
            **settings,
        )
    placed = replace(reconstruction, round=observation.round, client=observation.client)
    remarks = upload.exchange.remarks if upload.exchange is not None else ()
    return placed, [*remarks, *(str(each.message) for each in caught)]


def _network(tapped: Tapped, folder: Path, observation: Observation) -> nn.Module:
    """The network as it was trained: with what it has besides an adapter, and what is not in the upload frozen."""
    public = observation.settings
    network = built(tapped, public.shape, public.classes).train()
    if base := read_arrays(folder / BASE):
        network.load_state_dict(base, strict=False)
    own = dict(network.named_parameters())
    if set(observation.parameters) <= set(own):
        for name, value in own.items():
            value.requires_grad_(name in observation.parameters)
    if public.classes == 2 and _logits(network.eval(), public.shape) == 1:
        network.register_forward_hook(_with_zero)
    return network.train()


def _logits(network: nn.Module, shape: tuple[int, int, int]) -> int:
    with torch.no_grad():
        output = network(torch.zeros(1, *shape))
    return int(output.shape[-1]) if isinstance(output, Tensor) and output.ndim == 2 else 0


def _with_zero(_: nn.Module, given: Any, output: Tensor) -> Tensor:
    """One logit z is two, 0 and z: their cross-entropy is the binary one of z."""
    return torch.cat([torch.zeros_like(output), output], dim=1)


def _as_of_one_rate(observation: Observation, exchange: Exchange | None) -> Observation:
    """The update that one learning rate without weight decay makes; exact for one step, else to first order."""
    public = observation.settings
    if exchange is None or public.algorithm == "fedsgd":
        return observation
    decays = exchange.optimizers in (("sgd",), ("adamw",))
    upload = dict(observation.upload)
    for name, own in exchange.rates.items():
        if name in upload and own.learning_rate:
            decay = public.local_steps * own.learning_rate * own.weight_decay * decays
            decayed = upload[name] + decay * observation.parameters[name]
            upload[name] = decayed * (public.learning_rate / own.learning_rate)
    return replace(observation, upload=upload)


def _truth(upload: _TappedUpload, heard: Iterable[_TappedUpload]) -> Truth | None:
    """What attacks on an upload are scored by; ``None``: it was not kept."""
    if upload.known is None:
        return None
    client, own = upload.observation.client, _on_unit_scale(upload.observation, upload.known)
    others = _others(client, own, heard)
    return Truth(
        round=upload.observation.round,
        client=client,
        images=own,
        labels=upload.known.labels,
        others=others if len(others) else None,
        other_labels=torch.zeros(len(others), dtype=torch.int64) if len(others) else None,
    )


def _others(client: int, own: Tensor, heard: Iterable[_TappedUpload]) -> Tensor:
    """Other clients' images, no two of them alike and none like one of this client's."""
    seen = {image.numpy().tobytes() for image in own}
    others: list[Tensor] = []
    for other in heard:
        if other.known is None or other.observation.client == client:
            continue
        for image in _on_unit_scale(other.observation, other.known):
            if (key := image.numpy().tobytes()) not in seen and len(others) < OTHERS:
                seen.add(key)
                others.append(image)
    return torch.stack(others) if others else own[:0]


def _on_unit_scale(observation: Observation, known: TrainedOn) -> Tensor:
    """The images before they were normalised; a value a hair outside [0, 1] is rounding."""
    public = observation.settings
    mean, std = (torch.tensor(values)[:, None, None] for values in (public.mean, public.std))
    return (known.images.float() * std + mean).clamp(0, 1)


def _offers(judge: Truth) -> tuple[Guess, ...]:
    """What somebody offers who saw no upload: the mean of other clients' images, and grey."""
    if judge.others is not None:
        return guesses(judge.others)
    return (Guess("guess-grey", torch.full_like(judge.images[0], GREY)),)


def _scored(reconstruction: Reconstruction, upload: _TappedUpload, judge: Truth, name: str) -> tuple[Score, ...]:
    if bool((judge.labels < 0).any()):  # they were not seen, so those that the attack names are not compared
        unnamed = (replace(each, labels=torch.full_like(each.labels, -1)) for each in reconstruction.attempts)
        reconstruction = replace(reconstruction, attempts=tuple(unnamed))
    changed = upload.exchange is not None and upload.exchange.changed
    kind = "protected" if upload.line is not None else "changed" if changed else "unprotected"
    std, threshold = upload.observation.settings.std, AdversaryConfig().success_ssim
    named = replace(reconstruction, attack=name)
    return score(named, kind, judge, _offers(judge), std, threshold, perceptual=False).scores


def _pictured(folder: Path, reconstruction: Reconstruction, judge: Truth | None, name: str) -> str:
    """Write originals, where they are known, above what the attack made of them, in no order."""
    rows = [reconstruction.images] if judge is None else [judge.images, reconstruction.images]
    strips = [torch.cat([*row[:16].cpu()], dim=2) for row in rows]
    wide = max(strip.shape[2] for strip in strips)
    image = torch.cat([torch.nn.functional.pad(strip, (0, wide - strip.shape[2])) for strip in strips], dim=1)
    path = f"reconstructions/{reconstruction.round:04d}-{reconstruction.client:04d}-{name}.png"
    with writing(""):
        (folder / "reconstructions").mkdir(exist_ok=True, mode=0o700)
        write_whole(folder / path, png(image))
    return path


def _forms(heard: Iterable[_TappedUpload]) -> tuple[str, ...]:
    """What the replies hold, and how that is known."""
    told: dict[str, list[str]] = {}
    for upload in heard:
        if upload.exchange is not None and upload.exchange.form is not None:
            summed = f"; secure aggregation: attacked is the mean of {upload.exchange.clients} uploads"
            text = f"{_HOLDS[upload.exchange.form]} ({upload.exchange.source})"
            told.setdefault(text + (summed if upload.exchange.summed else ""), []).append(upload.name)
    return tuple(f"Replies {', '.join(names)} hold {text}." for text, names in told.items())


def _measured(results: Sequence[AttackResult], heard: Sequence[_TappedUpload]) -> tuple[str, ...]:
    """Guess and measured, for each attack; and which uploads are not scored."""
    unscored = ", ".join(upload.name for upload in heard if upload.known is None)
    left = (f"Not scored, since what the clients trained on was not kept: {unscored}.",) if unscored else ()
    offered = [result for result in results if result.upload == "none"]
    if not offered:
        return left
    guess = min(offered, key=lambda result: result.error)
    lines = []
    for result in (each for each in results if each.upload != "none"):
        picked = f", picked out {result.identified} of {result.victims}" if result.identified is not None else ""
        among = f" among {result.candidates} (chance 1 in {result.candidates})" if picked else ""
        lines.append(
            f"Guess: {guess.attack} has a mean squared error of {guess.error:.2g}. Measured: {result.attack} has "
            f"{result.error:.2g}, recovered {result.recovered} of {result.victims} images{picked}{among}."
        )
    return (*lines, *left)


def _proven(heard: Sequence[_TappedUpload]) -> str:
    lines = [upload.line for upload in heard if upload.line is not None]
    changed = [upload.name for upload in heard if upload.exchange is not None and upload.exchange.changed]
    if changed and len(lines) < len(heard):
        return (
            f"Proven: nothing; what changed {', '.join(changed)} after training is not known: [tap.noise] says it if "
            "that is noise."
        )
    if len(lines) < len(heard):
        return "Proven: nothing; no mechanism of fedpriv.flower.privatise, LocalDpMod or Opacus acted on these uploads."
    worst = min(lines, key=lambda line: line.badness)
    told = worst.ceilings.get("told")
    makers = dict.fromkeys(upload.exchange.noise for upload in heard if upload.exchange is not None)
    others = [maker for maker in makers if maker not in ("", "privatise")]
    by = f" of the noise of {', '.join(others)}" if others else ""
    limit = "nothing" if told is None or told.gamma is None else f"in at most {told.gamma:.1%} of cases"
    epsilon = "no epsilon" if worst.epsilon is None else f"({shown_epsilon(worst.epsilon)}, {worst.delta:g})-DP"
    return (
        f"Proven{by}, of client {worst.client} after {worst.participations} answers, {worst.adjacency}: {epsilon}; an "
        f"attack tells which of 100 images it was: {limit} (chance 1.0%)."
    )
