"""Attack what a tap has recorded of a user's own Flower app; what clients trained on is only read to score it."""

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedpriv.attacks.baselines import GREY, Guess
from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.observation import OTHERS, Observation, PublicSettings, list_observations, read_observation
from fedpriv.attacks.own_model import Criterion, attack_config, reconstruct
from fedpriv.attacks.reconstruction import AttackJob, Reconstruction
from fedpriv.attacks.referee import Truth, public_guesses, score, score_guesses
from fedpriv.attacks.settings import known_attack
from fedpriv.core.columns import ColumnSpec, worded
from fedpriv.core.config import AdversaryConfig, parse_override
from fedpriv.core.errors import InputError, some_of
from fedpriv.core.files import as_json, write_whole, writing
from fedpriv.core.finding import png
from fedpriv.core.lab.results import attack_results
from fedpriv.core.numbers import percent, several
from fedpriv.core.progress import Progress
from fedpriv.core.reading import read_file
from fedpriv.core.records import AttackResult, LedgerLine, Score, shown_epsilon
from fedpriv.core.registry import ATTACKS
from fedpriv.data.tokenizers import Bytes
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
    joined,
    read_arrays,
    read_exchanges,
    read_tapped,
    read_truth,
)
from fedpriv.flower.inference import records_of
from fedpriv.flower.learner import Learner, Replay, as_learned, filtered, learner_of, own_loss, replayed, unrepeated
from fedpriv.flower.uploads import revealed
from fedpriv.flower.watch import MOST_IMAGES, OWN_LOSS
from fedpriv.mechanisms import recorded_mechanism
from fedpriv.mechanisms.gaussian import as_normal

_RESULT = "attacks.json"
_HOLDS: Mapping[Form, str] = {
    "weights": "the parameters after training",
    "update": "the update, parameters after minus before",
    "negated update": "the update, parameters before minus after",
    "gradient": "a gradient",
}
_NO_LPIPS = "not computed for a tap's pictures"
SECONDS = 600.0
"""That the attacks of one command may take."""

_ATTACKS = {"image": ("iga",), "row": ("closed_form", "iga"), "sentence": ("dager", "lookup", "text_map")}
_WITHIN = ("Opacus", "tap.noise")  # noise that is, or may be, in the training itself, which no replay repeats
_OF_LABELS = "classes: labels"  # in warnings that do not hold of what has no labels


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
    exchange: Exchange

    @property
    def name(self) -> str:
        """As users name it."""
        return f"{self.observation.round}-sum" if self.exchange.summed else self.exchange.name


def attack_tapped(
    folder: Path,
    names: Sequence[str],
    victims: Sequence[str],
    overrides: Sequence[str],
    progress: Progress,
    seconds: float = SECONDS,
) -> TappedSummary:
    """Attack the uploads in the folder of a tap until the seconds are over, and write attacks.json there."""
    tapped = read_tapped(folder)
    if tapped is None:
        raise InputError(f"{folder} is not the folder of a tap")
    settings = checked_settings(overrides, names)
    exchanges = read_exchanges(folder)
    everything = _heard(folder, exchanges)
    if not (everything or exchanges):
        raise InputError(f"{folder} holds no observations: the clients' logs say why")
    wanted = _chosen(everything, exchanges, victims, folder)
    campaign = _Campaign(folder, tapped, tuple(names), settings, progress, time.monotonic() + seconds)
    for place, upload in enumerate(wanted):
        campaign.attack(upload, everything, len(wanted) - place)
    for text in dict.fromkeys(campaign.told):
        progress.warn(text)
    results = attack_results(campaign.scores, AdversaryConfig().success_ssim, _NO_LPIPS)
    others = [each for each in campaign.left_of(exchanges) if not victims or each.name in victims]
    verdict = (
        *_looked_at(folder, tapped, others, everything),
        *campaign.refused,
        *_forms(campaign.heard),
        *_measured(results, campaign),
        *([_proven(campaign.heard)] if campaign.heard else []),
    )
    summary = TappedSummary(results, verdict, tuple(dict.fromkeys(campaign.told)), tuple(campaign.pictures))
    with writing(""):
        write_whole(folder / _RESULT, as_json(summary))
    return summary


@dataclass(frozen=True, eq=False)
class _TappedVictim:
    """An upload with the network, as attacks are given both, and what scores them."""

    observation: Observation  # with the learner's names, as one learning rate makes it
    learner: Learner
    loss: Criterion
    about: Exchange
    replay: Replay
    judge: Truth | None
    line: LedgerLine | None  # of noise that is known

    @property
    def public(self) -> PublicSettings:
        """What is public."""
        return self.observation.settings


def _victim(tapped: Tapped, folder: Path, upload: _TappedUpload, everything: Sequence[_TappedUpload]) -> _TappedVictim:
    """Build the network of an upload, and compare its training with ours."""
    about = _as_seen(upload)
    own = tapped.model or about.network
    if own is None:
        raise InputError('its network is not known: tap.model = "package.module:Name" in fedpriv.toml names it')
    network = _network(replace(tapped, model=own), folder, upload.observation, about)
    loss = imported(tapped, f"torch.nn.functional:{about.loss}" if about.task in OWN_LOSS else tapped.loss, "tap.loss")
    learner = learner_of(network, about, loss)
    observation = as_learned(_as_of_one_rate(upload.observation, upload.exchange), learner, about)
    known = upload.known
    replay = Replay()
    if about.local:
        replay = unrepeated(f"the client keeps {some_of(about.local, 4)}, which it trains as well")
    elif known is not None and known.batches and about.noise not in _WITHIN:
        names = dict(zip(upload.observation.parameters, observation.parameters, strict=True))
        after = {names[name]: value for name, value in known.after.items() if name in names}
        replay = replayed(learner, observation, replace(known, after=after), about.task)
    criterion = own_loss if about.task in OWN_LOSS else loss
    if about.task in ("one logit", "one probability"):
        criterion = torch.nn.functional.cross_entropy
    judge = _truth(upload, about, everything)
    return _TappedVictim(observation, learner, criterion, about, replay, judge, upload.line)


def _as_seen(upload: _TappedUpload) -> Exchange:
    """What was seen of an upload; what was not is as the settings have it."""
    about = upload.exchange
    return about if about.example else replace(about, example=upload.observation.settings.shape, task="classes")


@dataclass(frozen=True, eq=False)
class _Campaign:
    """The attacks of one command, one after the other until its time is up."""

    folder: Path
    tapped: Tapped
    names: tuple[str, ...]  # of the attacks; empty: those that fit
    settings: Mapping[str, Mapping[str, Any]]  # by attack
    progress: Progress
    until: float  # by time.monotonic()
    heard: list[_TappedUpload] = field(default_factory=list)  # uploads whose network is known
    attacked: set[str] = field(default_factory=set)  # the stems of those that an attack has read
    scores: list[Score] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  # what makes an attack mean less
    pictures: list[str] = field(default_factory=list)
    # sentences on attacks that were not made, or whose failure shows nothing
    refused: list[str] = field(default_factory=list)

    def chance(self, result: AttackResult) -> float:
        """How often a guess picks an image out at most, where of all that is offered for a batch the nearest counts."""
        group = (score for score in self.scores if (score.attack, score.upload) == (result.attack, result.upload))
        return statistics.fmean(score.chance for score in group if score.chosen and score.chance is not None)

    def left_of(self, exchanges: Sequence[Exchange]) -> list[Exchange]:
        """Replies that no gradient attack was made on, alone or in their round's sum."""
        summed = {upload.exchange.round for upload in self.heard if upload.exchange.summed}
        alone = [each for each in exchanges if not (each.summed and each.round in summed)]
        return [each for each in alone if each.stem not in self.attacked]

    def attack(self, upload: _TappedUpload, everything: Sequence[_TappedUpload], left: int) -> None:
        """Attack an upload, the first of so many that are left: all attacks have equal shares of the time."""
        try:
            victim = _victim(self.tapped, self.folder, upload, everything)
        except InputError as error:
            if self.tapped.model is not None:
                raise
            self.refused.append(f"No gradient attack on {upload.name}: {error}.")
            return
        self.heard.append(upload)
        chosen = self._chosen(victim.about)
        for number, name in enumerate(chosen):
            share = left * len(chosen) - number  # time that one attack leaves is that of all others
            self._attack(victim, name, (self.until - time.monotonic()) / share)
        if victim.judge is not None and (offers := _offers(victim.judge)):
            guesses = score_guesses(offers, victim.judge, victim.public.std, perceptual=False)
            self.scores.extend(guesses.scores)

    def _chosen(self, about: Exchange) -> tuple[str, ...]:
        """The attacks that were named, here or by their settings, or those that fit what an example is."""
        named = self.names or tuple(
            name for name in self.settings if all(name not in each for each in _ATTACKS.values())
        )
        return named or (("iga",) if about.task in OWN_LOSS else _ATTACKS[about.kind])

    def _attack(self, victim: _TappedVictim, name: str, seconds: float) -> None:
        """Make one attack, and enter what came of it: a failure counts only if the training was seen right."""
        what = f"{name} on {victim.observation.title}"
        if seconds <= 0:
            self.refused.append(f"{what}: not run, time was up: --seconds gives more.")
            return
        doubt = victim.replay.doubt
        if doubt is not None and doubt.bars(known_attack(name)) and victim.line is None:
            self.refused.append(f"{what}: {doubt.text}.")
            return
        self.progress.stage(what)
        try:
            reconstruction, remarks = _reconstructed(victim, name, self.settings.get(name, {}), seconds)
        except InputError as error:
            self.refused.append(f"{what}: {worded(str(error).removeprefix(f'attack {name}: '), victim.about.kind)}.")
            return
        if victim.about.noise in _WITHIN:
            self.told.append(f"the noise of {victim.about.noise} is in the training, so that was not repeated")
        self.told.extend([*victim.about.remarks, *remarks, *filter(None, [victim.replay.longer])])
        self.attacked.add(victim.about.stem)
        self.pictures.append(_pictured(self.folder, victim, reconstruction, name))
        if victim.judge is None:
            return
        scores = _scored(victim, victim.judge, reconstruction, name)
        if doubt is not None and not any(score.recovered for score in scores if score.chosen):
            self.refused.append(f"{what}: it recovered nothing, and that shows nothing: {doubt.reason}.")
            return
        self.scores.extend(scores)


def checked_settings(overrides: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Settings by attack; raises InputError where there is no such attack or setting."""
    settings: dict[str, dict[str, Any]] = {}
    for text in overrides:
        keys, value = parse_override(text)
        if len(keys) != 3 or keys[0] != "adversary" or keys[1] not in ATTACKS or (names and keys[1] not in names):
            raise InputError(
                key="--set",
                given=".".join(keys),
                allowed="allowed is adversary.NAME.KEY of an attack; all else is in the app's fedpriv.toml",
            )
        settings.setdefault(keys[1], {})[keys[2]] = value
    for name in {**dict.fromkeys(names), **settings}:
        attack_config(name, settings.get(name, {}))
    return settings


def _heard(folder: Path, exchanges: Sequence[Exchange]) -> tuple[_TappedUpload, ...]:
    by_stem, uploads = {exchange.stem: exchange for exchange in exchanges}, []
    for path in list_observations(folder / "observations"):
        known = read_truth(folder / TRUTH / path.name)
        line = read_file(folder / LEDGER / f"{path.stem}.json", LedgerLine)
        seen = read_observation(path)
        exchange = by_stem.get(path.stem) or Exchange(seen.round, seen.client, 0, "train", {}, {})  # of version 0.2
        uploads.append(_TappedUpload(seen, known, line, exchange))
    masked = [upload for upload in uploads if upload.exchange.summed]
    by_round: dict[int, list[_TappedUpload]] = {}
    for upload in masked:
        by_round.setdefault(upload.exchange.round, []).append(upload)
    sums = [_sum(by_round[number]) for number in _complete(by_round)]
    return (*(upload for upload in uploads if upload not in masked), *sums)


def _complete(by_round: Mapping[int, Sequence[_TappedUpload]]) -> Iterator[int]:
    """Rounds all of whose uploads were written down: a tap writes each client's first ones alone."""
    written = Counter(upload.exchange.client for uploads in by_round.values() for upload in uploads)
    most, before = max(written.values(), default=0), Counter[int]()
    for number in sorted(by_round):
        if max(before.values(), default=0) < most:
            yield number
        before.update(upload.exchange.client for upload in by_round[number])


def _sum(uploads: Sequence[_TappedUpload]) -> _TappedUpload:
    """What the server has of uploads that secure aggregation adds up: their mean, as one client's with all batches."""
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
        mechanism=_of_mean(public[0].mechanism, len(uploads)),
    )
    kept = [upload.known for upload in uploads if upload.known is not None]
    known = joined(kept, public[0].local_steps) if len(kept) == len(uploads) else None
    lines = [upload.line for upload in uploads if upload.line is not None]
    line = min(lines, key=lambda each: each.badness) if len(lines) == len(uploads) else None
    exchange = replace(first.exchange, clients=len(uploads))
    return _TappedUpload(replace(first.observation, upload=mean, settings=settings), known, line, exchange)


def _of_mean(recorded: dict[str, Any], clients: int) -> dict[str, Any]:
    """Noise that is whole in the sum alone is taken as normal noise on the mean; a heuristic of the adversary only."""
    config = recorded_mechanism(recorded)
    if config.noise_at != "sum":
        return recorded
    return as_normal(config, config.noise_on_mean(clients, clients))


def _weight(exchange: Exchange) -> float:
    """How many examples a reply says that it is made of."""
    counts = (record.get(key) for record in exchange.replied.values() for key in ("num_examples", "num-examples"))
    return next((float(count) for count in counts if isinstance(count, int) and count > 0), 1.0)


def _chosen(
    uploads: Sequence[_TappedUpload], exchanges: Sequence[Exchange], victims: Sequence[str], folder: Path
) -> tuple[_TappedUpload, ...]:
    names = dict.fromkeys([*(upload.name for upload in uploads), *(exchange.name for exchange in exchanges)])
    if wrong := [name for name in victims if name not in names]:
        raise InputError(f"victim {wrong[0]}: not in {folder}; observed (as ROUND-CLIENT): {', '.join(names)}")
    return tuple(upload for upload in uploads if not victims or upload.name in victims)


def _looked_at(
    folder: Path, tapped: Tapped, others: Sequence[Exchange], uploads: Sequence[_TappedUpload]
) -> tuple[str, ...]:
    """What replies reveal that no gradient attack was made on: the first of each type, or all if they are few."""
    observations = {each.exchange.stem: each.observation for each in uploads}
    firsts = {exchange.type: exchange for exchange in reversed(others)}
    shown = others if len(others) <= 3 else [each for each in others if each is firsts[each.type]]
    lines: list[str] = []
    for exchange in shown:
        found = revealed(folder, exchange, observations.get(exchange.stem), records_of(tapped, exchange.client))
        lines += found.sentences
        if found.inputs is not None:
            path = _keep(folder, f"{exchange.stem}-inputs.safetensors", save({"inputs": found.inputs}))
            lines.append(f"{exchange.title}: these vectors are in {path}.")
    if len(shown) < len(others):
        lines.append(f"{len(others) - len(shown)} further replies are not shown: --victim ROUND-CLIENT shows one.")
    return tuple(lines)


def _reconstructed(
    victim: _TappedVictim, name: str, settings: Mapping[str, Any], seconds: float
) -> tuple[Reconstruction, list[str]]:
    """Reconstruct, and say what makes that mean less."""
    observation, public, about = victim.observation, victim.public, victim.about
    if public.examples > MOST_IMAGES:
        raise InputError(
            f"{observation.title} is made of {public.examples} {about.kind}s; attacked are uploads of {MOST_IMAGES} "
            "at most: tap a round with fewer local steps or smaller batches"
        )
    if about.is_text or known_attack(name).is_text:
        return _read(victim, name, settings, seconds), []
    if about.kind == "row" and "tv" in known_attack(name).model_fields:
        settings = {"tv": 0.0, **settings}  # neighbours in a row are not alike, as pixels are
    mechanism = recorded_mechanism(public.mechanism)
    seen = None if mechanism.protects else filtered(observation.upload, public, victim.replay.made)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reconstruction = reconstruct(
            victim.learner,
            victim.loss,
            observation.upload,
            public.shape,
            attack=name,
            classes=public.classes,
            labels=[0] * public.examples if about.task in OWN_LOSS else None,
            batch_size=public.batch_size or 1,
            examples=public.examples,
            parameters=observation.parameters,
            mechanism=seen or mechanism,
            learning_rate=None if public.algorithm == "fedsgd" else public.learning_rate,
            local_steps=public.local_steps,
            optimizer=public.optimizer,
            momentum=public.momentum,
            mean=public.mean,
            std=public.std,
            value_range=about.bounds or (0.0, 1.0),
            seconds=seconds,
            **settings,
        )
    placed = replace(reconstruction, round=observation.round, client=observation.client)
    texts = [worded(str(each.message), about.kind) for each in caught]
    if seen is not None:
        texts.insert(0, f"{observation.title} looks as if a filter ({seen.title}) had been applied; attacked as such")
    return placed, [text for text in texts if about.task not in OWN_LOSS or _OF_LABELS not in text]


def _read(victim: _TappedVictim, name: str, settings: Mapping[str, Any], seconds: float) -> Reconstruction:
    """Read sentences off an upload."""
    config = attack_config(name, settings)
    job = AttackJob(name, [victim.observation], victim.learner, config, 0, seconds=seconds)
    (outcome,) = attack_each(job).outcomes
    if outcome.result is None:
        raise InputError(outcome.failure)
    return outcome.result


def _network(tapped: Tapped, folder: Path, observation: Observation, about: Exchange) -> nn.Module:
    """The network as it was trained, in float32, with the layers that were not; what is not uploaded is frozen."""
    public = observation.settings
    network = built(tapped, public.shape, public.classes).float().train()
    if base := read_arrays(folder / BASE):
        network.load_state_dict(base, strict=False)
    own, named = dict(network.named_parameters()), [about.names.get(name, name) for name in observation.parameters]
    if set(named) <= set(own):
        for name, value in own.items():
            value.requires_grad_(name in named)
    elif about.names:
        raise InputError(f"{tapped.model} has no parameter {next(name for name in named if name not in own)!r}")
    return network


def _as_of_one_rate(observation: Observation, exchange: Exchange) -> Observation:
    """The update that one learning rate without weight decay makes; exact for one step, else to first order."""
    public = observation.settings
    if public.algorithm == "fedsgd":
        return observation
    decays = exchange.optimizers in (("sgd",), ("adamw",))
    upload = dict(observation.upload)
    for name, own in exchange.rates.items():
        if name in upload and own.learning_rate:
            decay = public.local_steps * own.learning_rate * own.weight_decay * decays
            decayed = upload[name] + decay * observation.parameters[name]
            upload[name] = decayed * (public.learning_rate / own.learning_rate)
    return replace(observation, upload=upload)


def _truth(upload: _TappedUpload, about: Exchange, heard: Iterable[_TappedUpload]) -> Truth | None:
    """What attacks on an upload are scored by; ``None``: it was not kept."""
    if upload.known is None:
        return None
    client, own = upload.observation.client, _examples(upload.observation.settings, upload.known, about)
    others = _others(client, own, heard, about)
    columns: tuple[ColumnSpec, ...] = ()
    if about.kind == "row":
        columns = _columns(torch.cat([own, others]))
        own, others = (_on_columns(columns, rows) for rows in (own, others))
    return Truth(
        round=upload.observation.round,
        client=client,
        images=own,
        labels=upload.known.labels,
        others=others if len(others) else None,
        other_labels=torch.zeros(len(others), dtype=torch.int64) if len(others) else None,
        columns=columns,
        tokenizer=Bytes() if about.is_text else None,
    )


def _examples(public: PublicSettings, known: TrainedOn, about: Exchange) -> Tensor:
    """What a client trained on, in the form of attacks: images on [0, 1], rows as they are, tokens."""
    examples = known.images
    if about.is_text:
        return torch.nn.functional.pad(examples, (0, public.shape[-1] - examples.shape[-1]))[:, None, None]
    if about.kind == "image":  # a value a hair outside [0, 1] is rounding
        mean, std = (torch.tensor(values)[:, None, None] for values in (public.mean, public.std))
        return (examples.float() * std + mean).clamp(0, 1)
    rows = examples.float().flatten(1)
    if about.task == "values":
        rows = torch.cat([rows, known.targets().float()], dim=1)
    return rows[:, None, None]


def _columns(rows: Tensor) -> tuple[ColumnSpec, ...]:
    """Numbers from the least to the largest of any client: an error is a share of that, for the referee alone."""
    flat = rows.flatten(1)
    ends = zip(flat.amin(0).tolist(), flat.amax(0).tolist(), strict=True)
    return tuple(
        ColumnSpec(str(place), "number", low=low, high=high if high > low else low + 1)
        for place, (low, high) in enumerate(ends)
    )


def _on_columns(columns: Sequence[ColumnSpec], rows: Tensor) -> Tensor:
    low, span = (torch.tensor([getattr(column, key) for column in columns]) for key in ("low", "span"))
    return ((rows - low) / span).clamp(0, 1)


def _others(client: int, own: Tensor, heard: Iterable[_TappedUpload], about: Exchange) -> Tensor:
    """Other clients' examples, no two of them alike and none like one of this client's."""
    seen = {image.numpy().tobytes() for image in own}
    others: list[Tensor] = []
    for other in heard:
        if other.known is None or other.observation.client == client:
            continue
        for image in _examples(other.observation.settings, other.known, about):
            fits = image.shape == own.shape[1:] and len(others) < OTHERS
            if fits and (key := image.numpy().tobytes()) not in seen:
                seen.add(key)
                others.append(image)
    return torch.stack(others) if others else own[:0]


def _offers(judge: Truth) -> tuple[Guess, ...]:
    """What somebody offers who saw no upload: made of other clients' examples, and grey; of tokens alone nothing."""
    if judge.others is not None:
        return public_guesses(judge.others, columns=judge.columns)
    return () if judge.tokenizer else (Guess("guess-grey", torch.full_like(judge.images[0], GREY)),)


def _scored(victim: _TappedVictim, judge: Truth, reconstruction: Reconstruction, name: str) -> tuple[Score, ...]:
    attempts = reconstruction.attempts
    if bool((judge.labels < 0).any()):  # they were not seen, so those that the attack names are not compared
        attempts = tuple(replace(each, labels=torch.full_like(each.labels, -1)) for each in attempts)
    if judge.columns:
        attempts = tuple(replace(each, images=_on_columns(judge.columns, each.images)) for each in attempts)
    kind = "protected" if victim.line is not None else "changed" if victim.about.changed else "unprotected"
    threshold = AdversaryConfig().success_ssim
    named = replace(reconstruction, attack=name, attempts=attempts)
    return score(named, kind, judge, _offers(judge), victim.public.std, threshold, perceptual=False).scores


def _pictured(folder: Path, victim: _TappedVictim, reconstruction: Reconstruction, name: str) -> str:
    """Write originals, where they are known, above what the attack made of them, in no order; rows and tokens alone."""
    stem = f"{reconstruction.round:04d}-{reconstruction.client:04d}-{name}"
    if victim.about.kind != "image":
        return _keep(folder, f"{stem}.safetensors", save({"examples": reconstruction.images.contiguous()}))
    judge = victim.judge
    rows = [reconstruction.images] if judge is None else [judge.images, reconstruction.images]
    strips = [torch.cat([*row[:16].cpu()], dim=2) for row in rows]
    wide = max(strip.shape[2] for strip in strips)
    padded = [torch.nn.functional.pad(strip, (0, wide - strip.shape[2])) for strip in strips]
    return _keep(folder, f"{stem}.png", png(torch.cat(padded, dim=1)))


def _keep(folder: Path, name: str, data: bytes) -> str:
    """Write what was reconstructed, and return where in the folder it is."""
    path = f"reconstructions/{name}"
    with writing(""):
        (folder / "reconstructions").mkdir(exist_ok=True, mode=0o700)
        write_whole(folder / path, data)
    return path


def _forms(heard: Iterable[_TappedUpload]) -> tuple[str, ...]:
    """What the replies hold, and how that is known."""
    told: dict[str, list[str]] = {}
    for upload in heard:
        if upload.exchange.form is not None:
            summed = f"; secure aggregation: attacked is the mean of {upload.exchange.clients} uploads"
            text = f"{_HOLDS[upload.exchange.form]} ({upload.exchange.source})"
            told.setdefault(text + (summed if upload.exchange.summed else ""), []).append(upload.name)
    return tuple(f"Replies {', '.join(names)} hold {text}." for text, names in told.items())


def _measured(results: Sequence[AttackResult], campaign: _Campaign) -> tuple[str, ...]:
    """Guess and measured, for each attack; and which uploads are not scored."""
    unscored = ", ".join(upload.name for upload in campaign.heard if upload.known is None)
    left = (f"Not scored, since what the clients trained on was not kept: {unscored}.",) if unscored else ()
    offered = [result for result in results if result.upload == "none"]
    guess = min(offered, key=lambda result: -_likeness(result), default=None)
    lines = [] if guess is None else [f"Guess: {guess.attack} has {_figure(guess)}."]
    for result in (each for each in results if each.upload != "none"):
        picked = f", picked out {result.identified} of {result.victims}" if result.identified is not None else ""
        if picked:
            guessed = percent(campaign.chance(result))
            picked += f" (each among {result.candidates}; a guess is right in at most {guessed})"
        kind = "row" if result.rows else "sentence" if result.sentences else "image"
        many = worded("images", kind)
        lines.append(
            f"Measured: {result.attack} has {_figure(result)}, recovered {result.recovered} of {result.victims} "
            f"{many}{picked}."
        )
    return (*lines, *left)


def _likeness(result: AttackResult) -> float:
    """The higher the better."""
    return result.sentences.share_right if result.sentences is not None else -result.error


def _figure(result: AttackResult) -> str:
    if result.sentences is not None:
        return f"{result.sentences.share_right:.0%} of tokens in their places"
    if result.rows is not None and result.rows.median_error is not None:
        return f"a median error of {result.rows.median_error:.1%} of a column's range"
    return f"a mean squared error of {result.error:.2g}"


def _proven(heard: Sequence[_TappedUpload]) -> str:
    lines = [upload.line for upload in heard if upload.line is not None]
    changed = [upload.name for upload in heard if upload.exchange.changed]
    if changed and len(lines) < len(heard):
        return (
            f"Proven: nothing; what changed {', '.join(changed)} after training is not known: [tap.noise] says it if "
            "that is noise."
        )
    if len(lines) < len(heard):
        return "Proven: nothing; no mechanism of fedpriv.flower.privatise, LocalDpMod or Opacus acted on these uploads."
    worst = min(lines, key=lambda line: line.badness)
    told = worst.ceilings.get("told")
    makers = dict.fromkeys(upload.exchange.noise for upload in heard)
    others = [maker for maker in makers if maker not in ("", "privatise")]
    by = f" of the noise of {', '.join(others)}" if others else ""
    limit = "no limit is proven" if told is None or told.gamma is None else f"in at most {told.gamma:.1%} of cases"
    why = worst.theorem.get("epsilon", "none").removeprefix("none: ")
    epsilon = (
        f"no epsilon ({why})" if worst.epsilon is None else f"({shown_epsilon(worst.epsilon)}, {worst.delta:g})-DP"
    )
    many = worded("images", _as_seen(heard[0]).kind)
    uses = "answer" if worst.sampling == "full" else "step"
    drawn = ", whether or not a batch has it" if worst.sampling.startswith("poisson") else ""
    return (
        f"Proven{by}, of client {worst.client} after {several(worst.participations, uses)}, {worst.adjacency}: "
        f"{epsilon}; an attack on these arrays tells which of 100 {many} it was{drawn}: {limit} (chance 1.0%)."
    )
