"""LoRA: frozen Linear layers with two small trained matrices beside each, named as in peft (Hu et al. 2022)."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedpriv.core.errors import one_line, some_of

if TYPE_CHECKING:
    from fedpriv.models.machinery.settings import TextModelSettings

ADAPTER = "default"  # peft's name of an adapter that has none


class LoraLinear(nn.Module):
    """A frozen Linear layer with an adapter: W x + b + (alpha / rank) B A x, B being zero at first."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        narrow = nn.Linear(base.in_features, rank, bias=False)
        wide = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(narrow.weight, a=math.sqrt(5))
        nn.init.zeros_(wide.weight)
        self.lora_A, self.lora_B = nn.ModuleDict({ADAPTER: narrow}), nn.ModuleDict({ADAPTER: wide})
        self._scale = alpha / rank

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        base: Tensor = self.base_layer(x)
        adapter: Tensor = self.lora_B[ADAPTER](self.lora_A[ADAPTER](x))
        return base + self._scale * adapter


class _Held(nn.Module):
    """A network under the name that peft gives it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Adapted(nn.Module):
    """A network with adapters; its parameters' names begin as in peft."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.base_model = _Held(network)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """As the network."""
        logits: Tensor = self.base_model.model(tokens)
        return logits


def with_adapters(network: nn.Module, settings: "TextModelSettings", layers: Sequence[str], head: str) -> Adapted:
    """Return the network with adapters beside some of its Linear layers, all else frozen."""
    network.requires_grad_(False)
    linear = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    chosen = {name: layer for name, layer in linear.items() if name.rpartition(".")[2] in layers}
    if not chosen:
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise settings.refusal(f"lora_layers = {list(layers)}: its Linear layers are {some_of(known)}")
    for name, layer in chosen.items():
        rank = settings.lora_rank or 1
        if rank > min(layer.in_features, layer.out_features):
            raise settings.refusal(
                f"lora_rank = {rank}: layer {name} has {layer.in_features} inputs and {layer.out_features} outputs"
            )
        parent, _, local = name.rpartition(".")
        setattr(network.get_submodule(parent), local, LoraLinear(layer, rank, settings.lora_alpha))
    last = linear[head]
    if last.bias is not None and head not in chosen:
        last.requires_grad_(True)
    adapted = Adapted(network)
    if settings.adapter:
        _load(adapted, settings)
    return adapted


def _load(adapted: Adapted, settings: "TextModelSettings") -> None:
    """Copy the numbers of an adapter that peft has saved; there its names lack that of the adapter."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        saved = load_file(settings.adapter)
    except (OSError, SafetensorError) as error:
        raise settings.refusal(f"adapter = {settings.adapter!r} cannot be read: {one_line(error)}") from None
    wanted = {name: value for name, value in adapted.named_parameters() if f".{ADAPTER}." in name}
    names = {name.replace(f".{ADAPTER}.", "."): name for name in wanted}
    for name in dict.fromkeys([*names, *saved]):
        if name not in saved or name not in names:
            raise settings.refusal(f"adapter = {settings.adapter!r} {'lacks' if name in names else 'has'} {name}")
        if saved[name].shape != wanted[names[name]].shape:
            shapes = f"{tuple(saved[name].shape)}, and here {tuple(wanted[names[name]].shape)}"
            raise settings.refusal(f"adapter = {settings.adapter!r}: {name} has shape {shapes}")
    with torch.no_grad():
        for name, target in names.items():
            wanted[target].copy_(saved[name])
