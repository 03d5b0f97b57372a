"""Build a network from its settings, try it on blank images, draw its weights, and compute its digest."""

import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch
from torch import Tensor, nn

from fedpriv.core.columns import ColumnSpec, signal_hint
from fedpriv.core.errors import InputError, reason_of
from fedpriv.core.randomness import seeded_generators, torch_stream
from fedpriv.gradients.calls import evaluating
from fedpriv.models.machinery.settings import (
    ModelSettings,
    OpenModelSettings,
    SequenceShape,
    Shape,
    TableModelSettings,
)

# Module -> as what it was imported, and the file that it was read from then.
_IMPORTED: dict[str, tuple[ModuleSpec | None, bytes]] = {}


def build_model(
    config: ModelSettings,
    shape: Shape,
    classes: int,
    seed: int,
    columns: Sequence[ColumnSpec] = (),
    sequences: SequenceShape | None = None,
) -> nn.Module:
    """Build the network that the config names, on the CPU in float32, in training mode.

    The weights depend on the seed alone: global generators are neither read nor changed. An own function's weights do
    so too as long as it draws them from the global generators of torch, numpy or Python.
    """
    with seeded_generators(torch_stream(seed, "model").initial_seed(), torch.device("cpu")):
        model = _construct(config, shape, classes, columns, sequences).to(device="cpu", dtype=torch.float32)
        _check_output(model, config, shape, classes, sequences)
    if config.init == "uniform":
        _draw_uniform(model, torch_stream(seed, "model"))
    return model


def model_digest(model: nn.Module, builder: str) -> bytes:
    """Return SHA-256 of what a network computes with, as far as the settings do not say it.

    That is its numbers, frozen ones and counts included, the kinds of its layers, and the files of your own that define
    it and its layers. What these import from further files, or read, is not looked at.
    """
    digest = sha256()
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for key, layer in model.named_modules():
        digest.update(f"{key} {type(layer).__module__}.{type(layer).__qualname__}\n".encode())
    for module in sorted({builder} | {type(layer).__module__ for layer in model.modules()}):
        if module.partition(".")[0] not in ("fedpriv", "torch"):
            digest.update(_code(module))
    return digest.digest()


def _code(module: str) -> bytes:
    """SHA-256 of the file of an imported module; of nothing where it has none."""
    imported = sys.modules.get(module)
    path, spec = getattr(imported, "__file__", None), getattr(imported, "__spec__", None)
    now = sha256(Path(path).read_bytes() if path else b"").digest()
    known = _IMPORTED.get(module)
    # Whoever reloads a module gives it another spec.
    if known is None or known[0] is not spec:
        _IMPORTED[module] = spec, now
    elif known[1] != now:
        raise InputError(
            f"{path} was changed after this process had imported it, and computes as it was; start a new process (in a "
            f"notebook: restart the kernel)"
        )
    return now


def _construct(
    config: ModelSettings, shape: Shape, classes: int, columns: Sequence[ColumnSpec], sequences: SequenceShape | None
) -> nn.Module:
    if sequences is None and isinstance(config, TableModelSettings):
        return config.table_network(columns, classes)

    def build() -> nn.Module:
        return config.network(shape, classes) if sequences is None else config.text_network(sequences)

    if not config.is_own:
        return build()
    builder = config.name.partition(":")[2] or config.name
    try:
        model = build()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        given = (
            f"shape={shape}" if sequences is None else f"length={sequences.length}, vocabulary={sequences.vocabulary}"
        )
        hint = f"the data are {sequences.task}" if sequences and isinstance(error, TypeError) else ""
        arguments = config.arguments if isinstance(config, OpenModelSettings) else None
        more = "".join(f", {name}={value!r}" for name, value in (arguments.plain() if arguments else {}).items())
        why = f"{builder}({given}, classes={classes}{more}) raises {reason_of(error)}"
        raise config.refusal(why).replaced(hint=hint) from error
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise config.refusal("the network has no parameters to train")
    return model.train()


def _check_output(
    model: nn.Module, config: ModelSettings, shape: Shape, classes: int, sequences: SequenceShape | None
) -> None:
    """Try two blank examples, in evaluation mode so that running statistics stay as they are."""
    sparse = next((name for name, value in model.named_buffers() if value.layout != torch.strided), None)
    if sparse is not None:
        raise config.refusal(f"buffer {sparse} is sparse: register its indices and values, and join them in forward")
    blank = torch.zeros(2, *shape) if sequences is None else torch.zeros(2, sequences.length, dtype=torch.int64)
    wanted = (2, sequences.length, classes) if sequences is not None and sequences.is_next else (2, classes)
    what = f"{'images' if sequences is None else 'sequences'} of shape {tuple(blank.shape)}"
    try:
        with evaluating(model), torch.no_grad():
            output = model(blank)
    except (Exception, SystemExit) as error:
        hint = signal_hint(shape) if sequences is None and config.is_own else ""
        raise config.refusal(f"cannot take {what}: {reason_of(error)}").replaced(hint=hint) from error
    given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if given != wanted:
        raise config.refusal(f"{what} give {given}; expected logits of shape {wanted}")


def _draw_uniform(model: nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
