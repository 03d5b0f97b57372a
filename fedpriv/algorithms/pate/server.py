"""PATE's one round: teachers vote on public images, the aggregator answers, and the student learns from the answers.

The order of what is written lets a killed run go on: the votes first, for clients are asked once, then the answers,
then the model. Noise on votes that the server sees is keyed by all of them, so that no two polls share any.
"""

import time
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from fedpriv.accounting.aggregators import Aggregator, ConfidentMax, NoisyMax
from fedpriv.accounting.votes import (
    noisy_max_cost,
    noisy_max_local_sensitivity,
    smooth_sensitivity,
    threshold_local_sensitivity,
    threshold_rdp,
)
from fedpriv.algorithms.pate.records import Knowledge, Poll, VotedAnswer, keep_poll, kept_poll, write_answers
from fedpriv.algorithms.pate.settings import PateConfig
from fedpriv.algorithms.pate.teachers import asked_rows, noise_of_votes, questions, teach, teachers, votes_type
from fedpriv.core.algorithm import sums
from fedpriv.core.asked_log import questions as asked_lines
from fedpriv.core.numbers import several
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import Secret, numpy_stream, seeded_generators, torch_stream
from fedpriv.core.records import Failure, RoundRecord
from fedpriv.core.runs import Checkpoint, RunFolder
from fedpriv.core.wire import pack
from fedpriv.core.world import State, World
from fedpriv.server.aggregation import ServerOptimizer
from fedpriv.server.evaluation import evaluate
from fedpriv.server.exchange import Clients, Federation, Replies, require_usable
from fedpriv.server.rounds import take_up
from fedpriv.server.uploads import Allowed, Upload, read_upload, refusal

_ROUND = 1


def run_knowledge(clients: Clients, world: World, folder: RunFolder, progress: Progress) -> None:
    """Run PATE from what the folder holds to the trained student."""
    if take_up(ServerOptimizer(world.experiment, world.initial), world, folder) == _ROUND:
        return
    began = time.monotonic()
    poll = kept_poll(folder)
    if poll is None:
        federation = clients.federation(world)
        progress.stage(f"asking {several(teachers(world), 'teacher')} about {len(asked_rows(world))} public images")
        poll = _asked(federation, folder)
        keep_poll(folder, poll)
    answers = answers_of(world, poll)
    write_answers(folder, answers)
    progress.stage(f"training the student on {several(sum(each.answered for each in answers), 'answer')}")
    student = _student(world, answers)
    loss, accuracy = evaluate(world, student)
    knowledge = _knowledge(world, poll, answers, accuracy)
    folder.write(knowledge)
    pate = PateConfig.required(world.experiment)
    record = RoundRecord(
        round=_ROUND,
        loss=loss,
        accuracy=accuracy,
        clients=tuple(range(world.experiment.federation.clients)),
        used=tuple(sorted(set(poll.clients.tolist()))),
        failures=poll.failures,
        seconds=time.monotonic() - began,
        bytes_up=poll.bytes_up,
        bytes_down=questions(world).nbytes * world.experiment.federation.clients,
        evaluated=len(world.measured_rows),
        epsilon=pate.claim(teachers(world), knowledge.asked).epsilon,
    )
    folder.append_round(record)
    folder.save_checkpoint(Checkpoint(_ROUND, ServerOptimizer(world.experiment, student).tensors()))
    progress.round_finished(record, _ROUND)


def answers_of(world: World, poll: Poll) -> tuple[VotedAnswer, ...]:
    """Decide one question after another, as far as the budget goes."""
    pate, queries = PateConfig.required(world.experiment), asked_rows(world).tolist()
    if pate.noise_at == "clients":
        # The noise is in the counts, and all of them were released at once.
        labels = poll.counts.argmax(1).tolist()
        return tuple(VotedAnswer(query, True, label) for query, label in zip(queries, labels, strict=True))
    aggregator, secret = pate.aggregator_of(teachers(world)), _secret(world, poll)
    answers: list[VotedAnswer] = []
    answered = 0
    for number, (query, counts) in enumerate(zip(queries, poll.counts, strict=True)):
        if not pate.is_affordable(teachers(world), number + 1, answered + 1):
            break
        label = aggregator.decide(counts, secret.stream("question", number).numpy())
        answered += label is not None
        answers.append(VotedAnswer(query, label is not None, label))
    return tuple(answers)


def sanitised_epsilon(world: World, poll: Poll, answers: Sequence[VotedAnswer]) -> float:
    """Return what these answers cost on these votes, as it may be shown (Papernot et al. 2018, appendix B)."""
    pate = PateConfig.required(world.experiment)
    sanitiser, aggregator = pate.sanitiser, pate.aggregator_of(teachers(world))
    # Who failed to vote is known; the counts are of the others.
    cost, local = data_dependent_cost(aggregator, sanitiser.order, poll.counts, answers, len(poll.votes))
    normal = float(_secret(world, poll).stream("sanitised").numpy().normal())
    return sanitiser.epsilon(cost, smooth_sensitivity(local, sanitiser.beta), pate.delta, normal)


def data_dependent_cost(
    aggregator: Aggregator, order: float, counts: NDArray[np.float64], answers: Sequence[VotedAnswer], voters: int
) -> tuple[float, NDArray[np.float64]]:
    """Return the Renyi cost of the answers on these votes, and its local sensitivity by distance: private."""
    if not isinstance(aggregator, NoisyMax | ConfidentMax):
        raise ValueError("no smooth sensitivity is known for Laplace noise")
    cost, local = 0.0, np.zeros(voters)
    sigma = aggregator.sigma2 if isinstance(aggregator, ConfidentMax) else aggregator.sigma
    for answer, row in zip(answers, counts, strict=False):
        votes = np.rint(row).astype(int).tolist()
        if isinstance(aggregator, ConfidentMax):
            threshold, sigma1 = aggregator.threshold, aggregator.sigma1
            cost += float(threshold_rdp(order, max(votes), threshold, sigma1))
            local += threshold_local_sensitivity(votes, voters, threshold, sigma1, order)
        if answer.answered:
            cost += float(noisy_max_cost(votes, sigma, order))
            local += noisy_max_local_sensitivity(votes, voters, sigma, order)
    return cost, local


def _secret(world: World, poll: Poll) -> Secret:
    """What noise on these votes is keyed by, and on no others."""
    return world.secret.derived("poll", sha256(np.ascontiguousarray(poll.counts).tobytes()).digest())


def _asked(federation: Federation, folder: RunFolder) -> Poll:
    """Have all clients vote, once."""
    world = federation.world
    clients = range(world.experiment.federation.clients)
    earlier = folder.asked()
    for line in asked_lines(world, _ROUND, [(world.initial, clients)]):
        if line not in earlier:
            folder.append_asked(line)
    asked = RecordDict(
        {
            "questions": pack({"images": questions(world)}),
            "task": ConfigRecord({"experiment": federation.task, "round": _ROUND}),
        }
    )
    contents = dict.fromkeys(clients, asked)
    masked = PateConfig.required(world.experiment).noise_at == "clients"
    return _masked(federation, contents) if masked else _open(federation, contents)


def _open(federation: Federation, contents: dict[int, RecordDict]) -> Poll:
    """Votes that the server sees."""
    world = federation.world
    per_client, asked = PateConfig.required(world.experiment).teachers_per_client, len(asked_rows(world))
    like = State({"votes": torch.zeros((per_client, asked), dtype=votes_type(world))}, {})
    answers = federation.reached.send("train.votes", _ROUND, contents)

    def outcome(client: int) -> Upload | Failure:
        if client not in answers:
            return Failure(client, "did not vote" if client in federation.nodes else federation.reached.reason(client))
        allowed = Allowed(int(world.sizes[client]), float("inf"), False)
        read = read_upload(answers[client], client, like, allowed)
        if isinstance(read, Failure):
            return read
        voted = read.state.parameters["votes"]
        if not ((voted >= 0) & (voted < world.dataset.classes)).all():
            return refusal(client, f"voted for a class that is none of {world.dataset.classes}")
        return read

    replies = Replies.of([outcome(client) for client in contents], 0)
    require_usable(replies, world.experiment.federation, _ROUND)
    votes = torch.cat([upload.state.parameters["votes"] for upload in replies.uploads]).to(torch.int16).numpy()
    counts = np.stack([np.bincount(column, minlength=world.dataset.classes) for column in votes.T])
    voters = np.repeat(replies.clients, per_client)
    return Poll(votes, voters.astype(np.int64), counts.astype(np.float64), replies.failures, replies.bytes_up)


def _masked(federation: Federation, contents: dict[int, RecordDict]) -> Poll:
    """The sum of noisy counts, of which the server sees nothing else."""
    world = federation.world
    shape = (len(asked_rows(world)), world.dataset.classes)
    each = PateConfig.required(world.experiment).teachers_per_client
    counts, replies = sums().ask_for_votes(federation.reached, _ROUND, contents, shape, each, noise_of_votes(world))
    require_usable(replies, world.experiment.federation, _ROUND)
    none = np.zeros((0, len(asked_rows(world))), dtype=np.int16)
    return Poll(none, np.array(replies.clients, dtype=np.int64), counts, replies.failures, replies.bytes_up)


def _student(world: World, answers: Sequence[VotedAnswer]) -> State:
    """The model after learning from the answered images; where there is none, as it was."""
    experiment = world.experiment
    known = [(answer.query, answer.label) for answer in answers if answer.label is not None]
    rows, labels = (torch.tensor([pair[k] for pair in known], dtype=torch.int64) for k in (0, 1))
    world.initial.load_into(world.model)
    seed = torch_stream(experiment.seed, "student-noise").initial_seed()
    with seeded_generators(seed, world.device):
        teach(
            world.model,
            world.network_input(world.dataset.x_test[rows]),
            labels.to(world.device),
            experiment.training,
            PateConfig.required(experiment).student_epochs,
            numpy_stream(experiment.seed, "student"),
            world.autocast,
        )
    return State.of(world.model)


def _knowledge(world: World, poll: Poll, answers: Sequence[VotedAnswer], accuracy: float) -> Knowledge:
    pate = PateConfig.required(world.experiment)
    truth = dict(zip(asked_rows(world).tolist(), world.dataset.y_test[asked_rows(world)].tolist(), strict=True))
    given = [answer for answer in answers if answer.label is not None]
    spent = pate.aggregator_of(teachers(world)).claim(len(answers), len(given), pate.delta, pate.teachers_per_client)
    return Knowledge(
        aggregator=pate.aggregator,
        noise_at=pate.noise_at,
        teachers=teachers(world),
        voted=len(set(poll.clients.tolist())) * pate.teachers_per_client,
        planned=pate.queries,
        asked=len(answers),
        answered=len(given),
        right=sum(truth[answer.query] == answer.label for answer in given) / len(given) if given else None,
        student=accuracy,
        evaluated=len(world.measured_rows),
        budget=pate.target_epsilon,
        spent=spent.epsilon if np.isfinite(spent.epsilon) else None,
        delta=pate.delta,
        sanitised=sanitised_epsilon(world, poll, answers) if pate.sanitised else None,
    )
