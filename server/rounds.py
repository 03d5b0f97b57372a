"""The rounds of a federation: ask clients, record observations, aggregate, evaluate.

In each attacked round of an active attack the clients whose uploads are attacked get a network in which it has replaced
parameters (``ActiveSettings.craft``); all others get the model. The server reads the answers to the made network and
throws them away: they are gradients of another function, which would ruin the model that it pretends to train. So a
round whose clients were all deceived leaves the model as it is. What is sent depends on the settings and the model
only, so that a resumed run sends the same again.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedpriv.attacks.observation import PublicSettings
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.settings import Access, ActiveSettings
from fedpriv.attacks.threat import threat_model
from fedpriv.core.algorithm import preparation_of, transport_of
from fedpriv.core.asked_log import questions, replay
from fedpriv.core.budget import Budget
from fedpriv.core.config import Experiment, FederationConfig
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.plan import participants
from fedpriv.core.progress import Progress
from fedpriv.core.records import Asked, RoundRecord
from fedpriv.core.runs import Checkpoint, RunFolder
from fedpriv.core.world import State, World, public_images
from fedpriv.gradients.operator import first_line
from fedpriv.server.aggregation import CentralNoise, ServerOptimizer
from fedpriv.server.evaluation import Evaluation, evaluate_all, evaluate_round
from fedpriv.server.exchange import Clients, Federation, Replies, ask_for_uploads, require_usable
from fedpriv.server.tap import public_settings, record_heard
from fedpriv.server.uploads import Upload, norm

_CHECKPOINT_SECONDS = 1.0
# An upload is named as what made the training diverge from so many times the median norm on.
_OUTLIER = 10


def run_rounds(clients: Clients, world: World, folder: RunFolder, progress: Progress) -> None:
    """Run the federation from the folder's last checkpoint, or from the start, to its last round."""
    settings = world.experiment.federation
    check_crafting(world)
    budget = Budget(world.experiment, world.plans)
    optimizer, noise = ServerOptimizer(world.experiment, world.initial), CentralNoise(world)
    done = take_up(optimizer, world, folder, noise)
    earlier = folder.asked()
    replay(budget, [line for line in earlier if line.round <= done])
    if done == settings.rounds or budget.is_used_up(done + 1):
        _evaluate_last(world, optimizer.state, folder)
        return
    run = _RoundLoop(clients.federation(world), optimizer, noise, folder, earlier)
    saved = time.monotonic()
    for number in range(done + 1, settings.rounds + 1):
        _count_repeats(budget, world, [line for line in earlier if line.round == number], optimizer.state)
        _tell_stops(budget, number, progress)
        if budget.is_used_up(number):
            break
        asked = participants(world.experiment, number, budget.left(number), world.secret)
        budget.spend(number, asked)
        try:
            record = run.round(number, asked)
        except BaseException:
            # Whatever ended this round (a failure, Ctrl-C), keep the ones before it; if the step was already taken the
            # state is in between, and the checkpoint on disk stands.
            if optimizer.rounds == number - 1:
                run.save()
            raise
        record = replace(record, epsilon=budget.worst_epsilon)
        folder.append_round(record)
        # A round's noisy sum is made once: nobody is sent the model before it is kept.
        central = world.experiment.mechanism.noise_at == "server"
        if central or time.monotonic() - saved > _CHECKPOINT_SECONDS:
            run.save()
            saved = time.monotonic()
        progress.round_finished(record, settings.rounds)
    _evaluate_last(world, optimizer.state, folder)
    run.save()


def _evaluate_last(world: World, state: State, folder: RunFolder) -> None:
    """Evaluate the last round of a run that federation.target_epsilon ended; it was not known to be the last."""
    *earlier, last = folder.rounds()
    # Versions that did not write how many examples were evaluated took all, in each round.
    if last.evaluated in (None, len(world.measured_rows)):
        return
    evaluation = evaluate_all(world, state, last.round)
    _check_converges(evaluation, last.round, ())
    folder.write_rounds([*earlier, replace(last, **vars(evaluation))])


def _check_converges(evaluation: Evaluation, number: int, uploads: Sequence[Upload]) -> None:
    if evaluation.loss is None or math.isfinite(evaluation.loss):
        return
    which = f": {_largest(uploads)}" if uploads else ""
    raise RunFailedError(f"round {number}: the test loss is {evaluation.loss}; the training diverged{which}")


def _count_repeats(budget: Budget, world: World, lines: Sequence[Asked], before: State) -> None:
    """Note that clients will be asked for a second answer in a round: a killed run had sent them something else."""
    if not any(line.sent for line in lines):
        return
    sent = {world.sent(before).hex()}
    if crafted_clients(world.experiment, lines[0].round, lines[0].clients):
        sent.add(world.sent(crafted_state(world, before)).hex())
    for line in lines:
        if line.sent not in sent:
            budget.spend_again(line.round, line.clients)


def _tell_stops(budget: Budget, number: int, progress: Progress) -> None:
    known = len(budget.stops)
    left = budget.left(number)
    if stops := budget.stops[known:]:
        progress.clients_stopped(number, stops, len(left))


def take_up(optimizer: ServerOptimizer, world: World, folder: RunFolder, noise: CentralNoise | None = None) -> int:
    """Return the last finished round, 0 for a new run, and bring the optimiser and metrics.jsonl to it."""
    checkpoint = folder.load_checkpoint()
    if checkpoint is None:
        evaluation = evaluate_round(world, optimizer.state, 0)
        if not math.isfinite(evaluation.loss or 0.0):
            raise world.experiment.model.refusal(f"its loss before training is {evaluation.loss}")
        folder.write_jsonl("metrics.jsonl", [])
        nothing_yet = 0.0 if world.experiment.protects else None
        folder.append_round(
            RoundRecord(
                round=0,
                clients=(),
                used=(),
                failures=(),
                seconds=0.0,
                bytes_up=0,
                bytes_down=0,
                epsilon=nothing_yet,
                **vars(evaluation),
            )
        )
        return 0
    optimizer.load(checkpoint.tensors, checkpoint.round)
    if noise is not None:
        noise.load(checkpoint.tensors, checkpoint.round)
    folder.keep_rounds(checkpoint.round)
    return checkpoint.round


@dataclass(frozen=True)
class _RoundLoop:
    """A federation, the model that it trains, and where that is written down; ``earlier``: what was asked before."""

    federation: Federation
    optimizer: ServerOptimizer
    noise: CentralNoise
    folder: RunFolder
    earlier: tuple[Asked, ...]

    def save(self) -> None:
        tensors = self.optimizer.tensors() | self.noise.tensors(self.optimizer.rounds)
        self.folder.save_checkpoint(Checkpoint(self.optimizer.rounds, tensors))

    def round(self, number: int, asked: tuple[int, ...]) -> RoundRecord:
        began = time.monotonic()
        world, before = self.federation.world, self.optimizer.state
        deceived = crafted_clients(world.experiment, number, asked)
        made = crafted_state(world, before) if deceived else before
        states = {client: made if client in deceived else before for client in asked}
        truthful = [client for client in asked if client not in deceived]
        for line in questions(world, number, [(before, truthful), (made, deceived)]):
            # A resumed run asks again what it was killed over.
            if line not in self.earlier:
                self.folder.append_asked(line)
        transport = transport_of(world.experiment)
        ask = ask_for_uploads if transport is None else transport.ask
        replies = ask(self.federation, number, states) if asked else Replies((), (), 0, 0)
        if asked:
            require_usable(replies, world.experiment.federation, number)
        if world.experiment.mechanism.noise_at == "server":
            replies = replace(replies, mean=self.noise.mean(number, replies.uploads))
        if (preparation := preparation_of(world.experiment)) is not None:
            preparation.record(world, self.folder, replies.uploads)
        honest = [upload for upload in replies.uploads if upload.client not in deceived]
        stolen = [upload for upload in replies.uploads if upload.client in deceived]
        record_heard(world, self.folder, number, before, honest, replies.mean)
        record_heard(world, self.folder, number, made, stolen, replies.mean)
        self._move(honest, replies.mean)
        evaluation = evaluate_round(world, self.optimizer.state, number)
        _check_converges(evaluation, number, honest)
        return RoundRecord(
            round=number,
            clients=asked,
            used=tuple(upload.client for upload in honest),
            failures=replies.failures,
            seconds=time.monotonic() - began,
            bytes_up=replies.bytes_up,
            bytes_down=replies.bytes_down,
            crafted=tuple(upload.client for upload in stolen),
            **vars(evaluation),
        )

    def _move(self, honest: Sequence[Upload], mean: State | None) -> None:
        """Take the server's step; gradients of parameters that the server has made are about another network."""
        if honest or mean is not None:
            settings = self.federation.world.experiment.federation
            self.optimizer.step(_aggregated(settings, honest) if mean is None else mean)
        else:
            self.optimizer.skip()


def _aggregated(settings: FederationConfig, uploads: Sequence[Upload]) -> State:
    """What the rule makes of a round's uploads; rules may be other packages', so that is checked before it is used."""
    rule = f"aggregation rule {settings.aggregation}"
    try:
        state = settings.rule.aggregate(uploads, settings.weighting)
    except Exception as error:
        raise RunFailedError(f"{rule} failed: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(state, State):
        raise RunFailedError(f"{rule} returned {type(state).__name__}, expected a State")
    like = uploads[0].state
    for given, wanted in ((state.parameters, like.parameters), (state.buffers, like.buffers)):
        for name in dict.fromkeys([*wanted, *given]):
            if name not in given or name not in wanted:
                raise RunFailedError(f"{rule} {'added' if name in given else 'left out'} {name}")
            value, shape = given[name], wanted[name].shape
            if not isinstance(value, Tensor) or value.shape != shape:
                what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise RunFailedError(f"{rule} returned {what} for {name}, expected a tensor of shape {tuple(shape)}")
            if not bool(value.isfinite().all()):
                raise RunFailedError(f"{rule} returned NaN or infinity in {name}: {_largest(uploads)}")
    return state


def _largest(uploads: Sequence[Upload]) -> str:
    """Say whose upload was the largest of a round after which the model is of no use."""
    norms = {upload.client: norm(upload.state.parameters) for upload in uploads}
    client = max(norms, key=lambda key: norms[key])
    largest, median = norms[client], statistics.median(norms.values())
    if largest > _OUTLIER * median:
        compared = f"{largest / median:.2g} times the median of the round" if median else "all others being zero"
        return f"the upload of client {client} has the norm {largest:.2g}, {compared}"
    return f"no upload stands out (the largest norm is {largest:.2g}, of client {client}); try a smaller learning rate"


def check_crafting(world: World) -> None:
    """Refuse settings under which an active attack could not be made."""
    if not world.experiment.adversary.crafts:
        return
    for client in np.unique(world.alike, return_index=True)[1].tolist():
        settings = public_settings(world.experiment, world.dataset, world.plans[client])
        refuse_local_training(settings, _active(world).name)
    crafted_state(world, world.initial)


def refuse_local_training(settings: PublicSettings, attack: str) -> None:
    """Raise AttackRefused if the clients send anything else than one gradient, or one step of SGD along it."""
    if settings.local_steps > 1 or (settings.algorithm == "fedavg" and settings.optimizer == "adam"):
        raise AttackRefused(
            f"{attack} reads one gradient; the clients train for {settings.local_steps} local step(s) with "
            f"{settings.optimizer} (expected fedsgd, or one step of sgd)"
        )


def crafted_clients(experiment: Experiment, round_number: int, asked: Sequence[int]) -> tuple[int, ...]:
    """Return the clients of a round that are sent made parameters: the victims, or all whose sum is read."""
    adversary = experiment.adversary
    if not adversary.crafts or round_number not in adversary.rounds:
        return ()
    if Access.UPLOADS in threat_model(adversary).grants:
        return tuple(asked[: adversary.victims])
    return tuple(asked)


def crafted_state(world: World, before: State) -> State:
    """Return what the deceived clients are sent in place of the global state."""
    attack = _active(world)
    before.load_into(world.model)
    wanted = min(attack.public_examples, len(world.dataset.x_test))
    images = world.network_input(public_images(world.dataset, wanted, world.experiment.seed, attack.name))
    try:
        made = attack.craft(world.model, images, threat_model(world.experiment.adversary))
    except InputError as error:
        raise world.experiment.model.refusal(str(error)) from None
    return State({name: made[name].cpu() for name in before.parameters}, before.buffers)


def _active(world: World) -> ActiveSettings:
    """The run's active attack, of which there is one."""
    adversary = world.experiment.adversary
    return adversary.settings(adversary.active_attack or "")
