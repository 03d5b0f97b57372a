"""What the attack stage shows, pictures, rows or sentences: originals, guesses, and what attacks made of uploads."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from PIL import Image
from torch import Tensor

from fedpriv.attacks.texts.referee import bare
from fedpriv.attacks.truth import Truth
from fedpriv.core.columns import Column, cell_texts
from fedpriv.core.runs import RunFolder, picture_name
from fedpriv.data.tokenizers import Tokenizer


def save_pictures(folder: RunFolder, what: str, known: Truth, pictures: Mapping[int, Tensor]) -> None:
    """Write images (C, H, W) on [0, 1] as PNG, or rows and sentences as JSON, numbered where a client has several."""
    sizes = Counter(known.place(number)[0] for number in range(len(known.images)))
    for number, image in pictures.items():
        client, place = known.place(number)
        name = picture_name(known.round, client, what, place if sizes[client] > 1 else None, "")
        save_shared(folder, name, image, known.columns, known.tokenizer)


def save_shared(
    folder: RunFolder, name: str, image: Tensor, columns: Sequence[Column], tokenizer: Tokenizer | None = None
) -> None:
    """Write one image, the cells of one row, or one sentence and its tokens, under a name without ending."""
    if tokenizer is not None:
        tokens = bare(image)
        pieces = [tokenizer.decode([token]) for token in tokens]
        folder.write_json(
            f"reconstructions/{name}.json", {"text": tokenizer.decode(tokens), "tokens": tokens, "pieces": pieces}
        )
        return
    if not columns:
        folder.write_bytes(f"reconstructions/{name}.png", png(image))
        return
    texts = cell_texts(columns, image.flatten().cpu().numpy())
    cells = {column.name: text for column, text in zip(columns, texts, strict=True)}
    folder.write_json(f"reconstructions/{name}.json", cells)


def png(image: Tensor) -> bytes:
    """Return an image (C, H, W) on [0, 1] as PNG."""
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(buffer, format="PNG")
    return buffer.getvalue()
