"""Labels of sentences, read off the last layer's gradient as those of images are (see ``reconstruction.labels``)."""

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.labels.last_layer import find_output_layer, infer_labels
from fedpriv.attacks.reconstruction.upload_model.model import Victim
from fedpriv.attacks.texts.scene import TextScene

__all__ = ["read_text_labels"]


def read_text_labels(scene: TextScene, victim: Victim, vectors: Network, width: int) -> Tensor:
    """Return the labels (B,) behind an upload: known ones, or those of the last layer, or else all 0.

    Args:
        scene: what is public.
        victim: the upload; without the table of tokens where the network has none.
        vectors: the network on vectors.
        width: of a vector.
    """
    if victim.labels is not None:
        return victim.labels
    nothing = torch.zeros(victim.model.examples, dtype=torch.int64, device=scene.device)
    if scene.is_next:
        return nothing
    shape = (1, scene.length, width)
    layer = find_output_layer(vectors, victim.parameters, shape, scene.classes)
    if layer is None:
        return nothing
    (labels,) = infer_labels(vectors, [victim], layer, shape, scene.classes)
    return nothing if labels is None else labels
