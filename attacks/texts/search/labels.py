"""Labels of sentences, counted in the last layer's gradient as those of images are (see ``reconstruction.labels``)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.labels import find_output_layer, infer_labels, label_signatures, match_labels
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.texts.scene import TextScene
from fedpriv.core.names import END, START

__all__ = ["read_text_labels"]

SAMPLES = 8  # sentences for each class, from which a batch's labels are told
PROBE = 20261126  # the seed of random ones, where no text is public


def read_text_labels(scene: TextScene, victim: Victim, soft: Network) -> Tensor:
    """Return the labels (B,) behind an upload: known ones, or those of the last layer, ascending; -1: none is told.

    Those of several sentences are the ones whose gradients, at public sentences and through the mechanism, add up best
    to what was heard.

    Args:
        scene: what is public.
        victim: the upload.
        soft: the network on probabilities.
    """
    if victim.labels is not None:
        return victim.labels
    examples = victim.model.examples
    nothing = torch.full((examples,), -1, device=scene.device)
    shape = (1, scene.length, scene.format.vocabulary)
    layer = None if scene.is_next else find_output_layer(soft, victim.parameters, shape, scene.classes)
    if layer is None or (examples > 1 and victim.model.protects_updates):
        return nothing
    if examples == 1:
        (labels,) = infer_labels(soft, [victim], layer, shape, scene.classes)
        return nothing if labels is None else labels
    texts = F.one_hot(_texts(scene), scene.format.vocabulary).to(next(iter(victim.parameters.values())))[:, None]
    signatures = label_signatures(soft, victim, layer, texts, scene.classes)
    return match_labels(victim.gradient[layer.name].flatten(), signatures, examples)


def _texts(scene: TextScene) -> Tensor:
    """Public sentences (n, T), or random ones."""
    if scene.public is not None:
        return scene.public[:SAMPLES].to(scene.device)
    stream = torch.Generator().manual_seed(PROBE)
    tokens = torch.randint(END + 1, scene.format.vocabulary, (SAMPLES, scene.length), generator=stream)
    tokens[:, 0] = START
    return tokens.to(scene.device)
