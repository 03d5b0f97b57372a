"""A finished run, opened again: its summary, its data, and the model that it trained."""

from fedpriv.core.asked_log import check_data
from fedpriv.core.config import Experiment
from fedpriv.core.config.rules import refuse_texts
from fedpriv.core.errors import InputError
from fedpriv.core.records import COMPLETED, Summary
from fedpriv.core.runs import Checkpoint, RunFolder
from fedpriv.core.world import State, World, build_world


def completed_summary(folder: RunFolder) -> Summary:
    """Return the summary of a run that came to its end; else its figures would be those of an earlier model."""
    summary = folder.final_summary()
    if summary.status != COMPLETED:
        raise InputError(
            f"{folder.path}: the run is {summary.status}, not completed: finish it with {folder.to_resume}"
        )
    return summary


def finished_world(folder: RunFolder, experiment: Experiment) -> World:
    """Build the experiment of a run whose model is looked at, as :func:`rebuilt_world`."""
    refuse_texts(experiment, "asking a trained model (probe, certify, serve)")
    return rebuilt_world(folder, experiment)


def rebuilt_world(folder: RunFolder, experiment: Experiment) -> World:
    """Build the experiment of a run that is looked at again, on the data that it was made with."""
    world = build_world(experiment, folder.world_secret(experiment))
    check_data(world, folder)
    return world


def final_checkpoint(folder: RunFolder, purpose: str) -> Checkpoint:
    """Return the checkpoint of a run, after at least one round."""
    checkpoint = folder.load_checkpoint()
    if checkpoint is None or checkpoint.round < 1:
        raise InputError(f"{folder.path} holds no model after a round: there is nothing to {purpose}")
    return checkpoint


def final_state(folder: RunFolder, world: World, purpose: str) -> State:
    """Return the numbers of a run's model, after at least one round."""
    checkpoint, tensors = final_checkpoint(folder, purpose), {}
    for kind, wanted in (("parameters", world.initial.parameters), ("buffers", world.initial.buffers)):
        tensors[kind] = {
            name: checkpoint.tensors[f"{kind}/{name}"] for name in wanted if f"{kind}/{name}" in checkpoint.tensors
        }
        if {name: value.shape for name, value in tensors[kind].items()} != {n: v.shape for n, v in wanted.items()}:
            raise InputError(f"{folder.path}: the checkpoint is not of this model")
    return State(tensors["parameters"], tensors["buffers"])
