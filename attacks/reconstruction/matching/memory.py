"""How many rows are attacked at once, so that they fit into memory, and memory that is kept between evaluations."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.dummy_gradients.routes import dummy_gradients, ghost_obstacle
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["MEASURED", "chunks", "keep_freed_memory", "row_bytes"]

# What one chunk of rows may take on a CPU. The number is fixed: results must not depend on what else runs.
CPU_BYTES = 2**30
# The share of a GPU's memory that one chunk may take.
GPU_SHARE = 0.5
# Bytes at the highest moment over those that are kept for the derivatives: these flow back next to them.
PEAK = 3
# The same for gradients that are written out: themselves, what is expected, what was heard, and their derivatives.
COPIES = 6
# Numbers of intermediate results for one pixel on the vmap route, a guess on the high side for small networks.
PER_PIXEL = 256
# Examples with which memory is measured; what more take follows in proportion.
MEASURED = 4096
# A block a little below 32 MiB, the largest whose release makes glibc keep blocks of that size (mallopt(3), the dynamic
# M_MMAP_THRESHOLD).
SIGN_BYTES = 31 * 2**20


def chunks(
    network: Network, rows: Sequence[Victim], shape: tuple[int, int, int], classes: int, *, written: bool = False
) -> Iterator[range]:
    """Cut rows into consecutive ranges that fit into memory.

    Args:
        network: the network.
        rows: the victim of each row.
        shape: (C, H, W).
        classes: number of classes.
        written: whether the objective asks for expected uploads written out.

    Raises:
        AttackRefused: not even one row fits.
    """
    if not rows:
        return
    each = max(
        len(victim.uploads) * row_bytes(network, victim, shape, classes, written=written)
        for victim in {(victim.model, len(victim.uploads)): victim for victim in rows}.values()
    )
    whole = _device_bytes(network.device)
    if each > whole:
        examples = rows[0].model.examples
        raise AttackRefused(
            f"one dummy batch of {examples} image(s) through this network needs about {each / 2**30:.1f} GiB; "
            f"{network.device} has {whole / 2**30:.1f} GiB"
        )
    allowed = CPU_BYTES if network.device.type == "cpu" else int(GPU_SHARE * whole)
    size = max(1, allowed // each)
    for start in range(0, len(rows), size):
        yield range(start, min(start + size, len(rows)))


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for what comes next, up to 64 MiB, instead of handing it back.

    One evaluation after the other asks for the same blocks. Handed back, their pages are cleared and mapped anew each
    time, which took up to a tenth of an evaluation. Where the C library is not glibc nothing changes.
    """
    torch.empty(SIGN_BYTES, dtype=torch.uint8)


def row_bytes(
    network: Network, victim: Victim, shape: tuple[int, int, int], classes: int, *, written: bool = False
) -> int:
    """Return about how much memory one row takes, measured on a blank one where the ghost route is open."""
    model = victim.model
    units = model.examples if model.needs_examples else 1
    number = torch.finfo(network.dtype).bits // 8
    measured = min(model.examples, MEASURED)
    images = torch.zeros(1, measured, *shape, dtype=network.dtype, device=network.device)
    ghost = not ghost_obstacle(network, images.shape[2:], classes)
    if model.training is not None:
        # Each step's gradients are kept, and the parameters after it.
        units = model.training.clients * (model.training.batch_size if model.protects_examples else 1)
        used = model.training.steps * model.training.clients * model.training.batch_size
        return number * (COPIES * network.size * units * model.training.steps + used * images[0, 0].numel() * PER_PIXEL)
    out = (
        COPIES * network.size * units * number
        if written or not ghost or model.mechanism.scales(network.names) is None
        else 0
    )
    if not ghost:
        return out + model.examples * images[0, 0].numel() * PER_PIXEL * number
    labels = torch.full((1, measured, classes), 1 / classes, dtype=network.dtype, device=network.device)
    return out + PEAK * _saved_bytes(network, victim, images.requires_grad_(), labels) * model.examples // measured


def _saved_bytes(network: Network, victim: Victim, images: Tensor, labels: Tensor) -> int:
    """The bytes that autograd keeps for the derivatives of the dummies' norms."""
    fixed = {value.untyped_storage().data_ptr() for value in victim.parameters.values()}
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Any:
        storage = value.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return value

    with saved_tensors_hooks(pack, lambda value: value):
        gradients = dummy_gradients(network, victim.parameters, images, labels, each=victim.model.needs_examples)
        total = gradients.squared().sum()
    del total
    return sum(size for pointer, size in kept.items() if pointer not in fixed)


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
