"""What the model of a finished run remembers of its texts: exposure of canaries, and extraction by sampling.

Both are attacks on the final model. The summary gets the results, too. Whoever wants a report of the folder writes it.
"""

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedpriv.accounting.memorisation import Statement, exposure_ceiling, guessed_exposure, of_copies, rank_ceiling
from fedpriv.attacks.memorisation.exposure import Exposure, Network, exposures
from fedpriv.attacks.memorisation.extraction import extraction, mean_losses, sampled
from fedpriv.config.texts import refuse_texts
from fedpriv.data.canaries import Canaries, drawn_canaries
from fedpriv.errors import InputError, RunFailedError
from fedpriv.files import writing
from fedpriv.lab.finished import completed_summary, final_checkpoint, final_state, finished_world
from fedpriv.progress import Progress
from fedpriv.randomness import numpy_stream, torch_stream
from fedpriv.records import CanaryGroup, CanaryResult, Extraction, Ledger, Memorisation
from fedpriv.runs import RunFolder
from fedpriv.threads import cpu_threads
from fedpriv.world import State, World

__all__ = ["audit_memorisation", "refuse_refuted"]

# A ceiling is refuted where what was measured has, under it, at most this probability, all canaries together.
_IMPOSSIBLE = 1e-3


def audit_memorisation(folder: RunFolder, samples: int, tokens: int, progress: Progress) -> Memorisation:
    """Measure what a run's final model remembers.

    Args:
        folder: of a completed run on texts, whose next token is learnt.
        samples: texts that the model writes.
        tokens: how many in a row have to stand in the training data.
        progress: told what happens.

    Returns:
        What is written to memorisation.json.

    Raises:
        InputError: the run is not finished, its folder is damaged, it learns no next token, or a number is out of
            range.
        RunFailedError: the results cannot be written.
    """
    summary = completed_summary(folder)
    experiment = folder.experiment()
    world = finished_world(folder, experiment, reads_texts=True)
    if not world.dataset.is_next:
        refuse_texts(experiment, "an audit of labels")
    length = world.dataset.shape[-1]
    if not 1 <= tokens < length:
        raise InputError(f"--tokens {tokens}: a sequence of this run has {length}; from 1 to {length - 1} are wanted")
    final = final_state(folder, world, final_checkpoint(folder, "audit"))
    with cpu_threads(experiment.engine.threads), torch.no_grad():
        progress.stage("ranking canaries")
        memorisation = _exposed(world, final, folder.ledger(), _extracted(world, final, samples, tokens))
    with writing(shlex.join(["fedpriv", "audit", str(folder.path), "--samples", str(samples), "--tokens", str(tokens)])):
        folder.write_memorisation(memorisation)
        folder.write_summary(summary.model_copy(update={"memorisation": memorisation}))
    return memorisation


def refuse_refuted(memorisation: Memorisation) -> None:
    """Raise where exposures refute what is claimed to be proven.

    Raises:
        RunFailedError: they do.
    """
    if memorisation.refuted:
        raise RunFailedError(
            "canaries refute the ledger: an exposure as large as measured has a probability below 0.1 % under what is "
            "claimed to be proven. The implementation or the proof is wrong"
        )


def _network(world: World, state: State) -> Network:
    """The model with these numbers, in evaluation mode."""
    state.load_into(world.model)
    world.model.eval()

    def logits(tokens: Tensor) -> Tensor:
        with world.autocast():
            found: Tensor = world.model(tokens.to(world.device))
        return found

    return logits


def _extracted(world: World, final: State, samples: int, tokens: int) -> Extraction:
    seed, dataset = world.experiment.seed, world.dataset
    text = dataset.text
    if text is None:
        raise TypeError("no texts")
    network = _network(world, final)
    written = sampled(network, samples, dataset.shape[-1], torch_stream(seed, "extraction"))
    losses = mean_losses(network, written)
    gains = mean_losses(_network(world, world.initial), written) - losses
    rows = np.concatenate([world.partitions[client] for client in range(len(world.partitions))])
    train, test = dataset.x_train[torch.from_numpy(np.unique(rows))].flatten(1), dataset.x_test.flatten(1)
    figures, found = extraction(written.numpy(), gains.numpy(), train.numpy(), test.numpy(), tokens)
    return replace(figures, texts=tuple(text.tokenizer.decode(each.tolist()) for each in found))


def _exposed(world: World, final: State, ledger: Ledger | None, extracted: Extraction) -> Memorisation:
    config, dataset, seed = world.experiment.data.canaries, world.dataset, world.experiment.seed
    if config is None:
        return Memorisation(extraction=extracted, theorem="the run has no canaries, and nothing is proven of texts")
    canaries = drawn_canaries(config, dataset, seed)
    rng = numpy_stream(seed, "canary-references")
    found, fit = exposures(_network(world, final), canaries, dataset.shape[-1], rng)
    unit = "" if ledger is None else ledger.unit
    statements = _statements(ledger, config.client)
    copies = [*canaries.copies.tolist(), *[0] * canaries.inserted]
    groups = tuple(
        _group(each, [one for one, number in zip(found, copies, strict=True) if number == each], canaries, statements, unit)
        for each in sorted(set(copies))
    )
    chances = [
        rank_ceiling(_together(statements, number, unit), one.bits, canaries.space)
        for one, number in zip(found, copies, strict=True)
        if number and statements
    ]
    return Memorisation(
        bits=math.log2(canaries.space),
        guess=guessed_exposure(canaries.space),
        client=config.client,
        canaries=tuple(CanaryResult(n, one.log_perplexity, one.rank, one.bits) for n, one in zip(copies, found, strict=True)),
        groups=groups,
        fit=fit,
        theorem=_theorem(statements, unit),
        # By the union bound, whatever the canaries have to do with each other.
        refuted=fit is None and bool(chances) and len(chances) * min(chances) < _IMPOSSIBLE,
        extraction=extracted,
    )


def _group(
    copies: int, found: Sequence[Exposure], canaries: Canaries, statements: Sequence[Statement], unit: str
) -> CanaryGroup:
    together = _together(statements, copies, unit) if copies else [Statement(0.0, 0.0)]
    ceiling = exposure_ceiling(together, canaries.space)
    first = rank_ceiling(together, math.log2(canaries.space), canaries.space)
    least = min(together, default=None)
    return CanaryGroup(
        copies=copies,
        canaries=len(found),
        exposure=statistics.fmean(one.bits for one in found),
        first=None if any(one.rank is None for one in found) else sum(one.rank == 1 for one in found),
        ceiling=ceiling,
        first_ceiling=first if first < 1 else None,
        epsilon=None if least is None else least.epsilon,
        delta=None if least is None else least.delta,
    )


def _statements(ledger: Ledger | None, client: int) -> list[Statement]:
    """What is proven of one unit of a client's data; empty: nothing."""
    lines = () if ledger is None else ledger.clients
    line = next((line for line in lines if any(client in each for each in line.ranges)), None)
    if line is None:
        return []
    proven = [(line.epsilon, line.delta), (line.pure_epsilon, 0.0)]
    return [Statement(epsilon, delta) for epsilon, delta in proven if epsilon is not None]


def _together(statements: Sequence[Statement], copies: int, unit: str) -> list[Statement]:
    """What is proven of all copies, which one client holds."""
    return [of_copies(statement, 1 if unit == "update" else copies) for statement in statements]


def _theorem(statements: Sequence[Statement], unit: str) -> str:
    if not statements:
        return "nothing is proven of the client that holds the canaries"
    of = "a client's whole data" if unit == "update" else "one sequence, and for copies group privacy"
    return (
        f"P[rank <= k] <= e^epsilon k / |R| + delta, with (epsilon, delta) of {of} (Vadhan 2017, Lemma 2.2); secrets "
        "are uniform"
    )
