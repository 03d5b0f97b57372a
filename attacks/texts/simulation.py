"""What attacks on texts take for a client's upload, by the network that each of them runs."""

import torch.nn.functional as F

from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.simulation import Trial, simulated_upload, trained_upload
from fedpriv.attacks.texts.scene import TextScene
from fedpriv.attacks.texts.search.ground import without
from fedpriv.attacks.texts.search.scoring import soft_batch, split, trained_network
from fedpriv.attacks.texts.search.soft import lookup_parameters, soft_network, token_vectors
from fedpriv.core.names import PAD
from fedpriv.gradients import Vector

__all__ = ["simulated_probabilities", "simulated_texts", "simulated_vectors"]


def simulated_texts(trial: Trial) -> Vector:
    """As attacks that run the network itself on tokens take it."""
    scene, victim = _scene(trial)
    tokens, targets = split(scene, trial.examples, trial.labels)
    return trained_upload(
        victim, len(tokens), lambda now, rows: scene.gradient(now, tokens[list(rows)], targets[list(rows)])
    )


def simulated_probabilities(trial: Trial) -> Vector:
    """As attacks that move probabilities of tokens take it."""
    scene, victim = _scene(trial)
    vocabulary = scene.format.vocabulary
    soft = soft_network(trained_network(scene, victim), vocabulary, "probabilities")
    dtype = next(iter(victim.parameters.values())).dtype
    inputs, labels = soft_batch(scene, F.one_hot(trial.examples, vocabulary).to(dtype)[None], trial.labels[None])
    return simulated_upload(soft, victim, inputs[0], labels[0])


def simulated_vectors(trial: Trial) -> Vector:
    """As attacks that move vectors of tokens take it: without what these are looked up in."""
    scene, victim = _scene(trial)
    vocabulary = scene.format.vocabulary
    network = trained_network(scene, victim)
    vectors = soft_network(network, vocabulary, "vectors")
    table = token_vectors(network, vocabulary)
    probabilities = F.one_hot(trial.examples, vocabulary).to(table)
    _, labels = soft_batch(scene, probabilities[None], trial.labels[None])
    tokens, _ = split(scene, trial.examples, trial.labels)
    inputs = table[tokens] * (tokens != PAD)[:, :, None]
    return simulated_upload(
        vectors, without(victim, lookup_parameters(network, vocabulary)), inputs[:, None], labels[0]
    )


def _scene(trial: Trial) -> tuple[TextScene, Victim]:
    settings = trial.observation.settings
    if settings.text is None:
        raise ValueError("the trial is not of texts")
    scene = TextScene.of(trial.model, settings.shape, settings.classes, settings.text, None)
    return scene, trial.victim(scene.names)
