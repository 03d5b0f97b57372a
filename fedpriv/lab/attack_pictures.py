"""Pictures of the attack stage: originals, guesses and what the attacks made of the uploads."""

import io
from collections import Counter
from collections.abc import Mapping

import torch
from PIL import Image
from torch import Tensor

from fedpriv.attacks.referee import Truth
from fedpriv.runs import RunFolder, picture_name

__all__ = ["png", "save_pictures"]


def save_pictures(folder: RunFolder, what: str, known: Truth, pictures: Mapping[int, Tensor]) -> None:
    """Write images (C, H, W) on [0, 1] as PNG, numbered where a client has several."""
    sizes = Counter(known.place(number)[0] for number in range(len(known.images)))
    for number, image in pictures.items():
        client, place = known.place(number)
        name = picture_name(known.round, client, what, place if sizes[client] > 1 else None)
        folder.write_bytes(f"reconstructions/{name}", png(image))


def png(image: Tensor) -> bytes:
    """Return an image (C, H, W) on [0, 1] as PNG."""
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(buffer, format="PNG")
    return buffer.getvalue()
