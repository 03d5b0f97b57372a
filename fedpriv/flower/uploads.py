"""What a reply reveals without the network: its arrays, counts, bytes, and the first dense layer in closed form.

The change of a dense layer's weights is the sum over examples of what its output was off by, times its input; the
change of its bias is the sum of the first factor alone. Of one example, or of a neuron that one example alone moves,
their ratio is the input itself (Phong et al. 2018), whatever network follows and whatever made the arrays: PyTorch lays
weights out as (out, in), Keras, Flax and scikit-learn as (in, out).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedpriv.attacks.observation import Observation
from fedpriv.flower.arrays import update_of
from fedpriv.flower.folder import MESSAGES, Exchange, read_arrays
from fedpriv.gradients import Vector

_SAME = 1e-3  # by which two ratios differ at most, over their norm, that are one input
_ALL_SAME = 1e-2  # where all neurons agree, which chance does not make
_FEW = 256  # values of an array that was quantised


@dataclass(frozen=True, eq=False)
class Revealed:
    """What one reply reveals."""

    sentences: tuple[str, ...]
    inputs: Tensor | None = None  # (N, features) that the first layer was given; `None`: it tells of none


def revealed(folder: Path, exchange: Exchange, observation: Observation | None) -> Revealed:
    """Look at one message and its reply."""
    arrays = read_arrays(folder / MESSAGES / f"{exchange.stem}.safetensors")
    before, update = _update(exchange, arrays, observation)
    lines = [*_leaves(exchange)]
    if exchange.unattacked:
        lines.append(f"No gradient attack: {exchange.unattacked}.")
    lines += _values(exchange, arrays, update)
    for name, value in arrays.items():
        if value.dtype == torch.uint8:
            lines += _bytes(name.partition("/")[2], bytes(value.tolist()))
    found = None
    if exchange.summed:
        lines.append("its arrays leave masked: the server has their sum, and metrics and configs in clear.")
    elif exchange.protected:
        lines.append("a mechanism made its arrays: what they tell is bounded by its ledger.")
    elif update:
        lines += [*_size(before, update), *_rows(update), *_labels(update)]
        found = first_inputs(update)
        lines += _inputs(found, update)
    return Revealed(tuple(f"{exchange.title}: {line}" for line in lines), found)


def _update(exchange: Exchange, arrays: Vector, observation: Observation | None) -> tuple[Vector, Vector]:
    """Parameters before, and the update, in the order of the message."""
    before, update = (observation.parameters, observation.upload) if observation is not None else ({}, {})
    if exchange.form is not None:
        sent = _part(arrays, "sent/")
        reply = _part(arrays, f"reply/{exchange.record}/")
        both = [name for name in exchange.order if name in sent and name in reply]
        both = [name for name in both if sent[name].is_floating_point() and sent[name].shape == reply[name].shape]
        before = before | {name: sent[name] for name in both}
        update = update | update_of(sent, reply, both, exchange.form)
    order = [name for name in exchange.order if name in update]
    return before, {name: update[name] for name in order or update}


def _part(arrays: Vector, prefix: str) -> Vector:
    """Arrays whose key begins so, by their own name."""
    found = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
    return {key.partition("/")[2] if prefix == "sent/" else key: value for key, value in found.items()}


def _leaves(exchange: Exchange) -> Iterator[str]:
    """All records of a reply."""
    parts = []
    for name, values in exchange.replied.items():
        listed = ", ".join(f"{key} = {value}" for key, value in list(values.items())[:4])
        more = f", and {len(values) - 4} more" if len(values) > 4 else ""
        parts.append(f"{name} ({listed}{more})")
    yield f"leaves: {'; '.join(parts) or 'nothing'}."


def _values(exchange: Exchange, arrays: Vector, update: Vector) -> Iterator[str]:
    """Counts in metrics, and arrays that are no update of anything that was sent."""
    for name, values in exchange.replied.items():
        ones = [key for key, value in values.items() if value == 1 and type(value) is int]
        if ones and any("example" in key or "sample" in key for key in ones):
            yield f"{name}.{ones[0]} = 1: all of it is about one example."
    for key, value in arrays.items():
        own = key.split("/", 2)[-1]
        if not key.startswith("reply/") or own in update or value.dtype == torch.uint8 or not value.numel():
            continue
        name, flat = key.removeprefix("reply/"), value.double().flatten()
        whole = bool((flat == flat.round()).all()) and float(flat.min()) >= 0
        shown = ", ".join(f"{number:g}" for number in flat[:6].tolist())
        if own.rpartition(".")[2] in ("running_mean", "running_var"):
            yield f"{name} is a mean or variance of what a layer was given."
        elif whole and len(flat) > 1:
            alone = int((flat == 1).sum())
            single = f"; {alone} of {len(flat)} are 1, which is about one example" if alone else ""
            yield f"{name} leaves as it is, whole numbers that add up to {flat.sum():g}, as counts do{single}: {shown}."
        else:
            yield f"{name} is no update of what was sent, and leaves as it is: {shown}."


def _size(before: Vector, update: Vector) -> Iterator[str]:
    """Norms, and what compression, clipping of values or an optimiser has left of an update."""
    flat = torch.cat([value.flatten() for value in update.values()])
    start = torch.cat([value.double().flatten() for value in before.values()]).norm() if before else torch.zeros(())
    yield f"the update of {len(flat):,} numbers has the norm {float(flat.norm()):.3g} (parameters: {float(start):.3g})."
    moved = flat[flat != 0]
    if not len(moved):
        yield "nothing moved, so it tells nothing."
        return
    if len(moved) < 0.5 * len(flat):
        yield f"{1 - len(moved) / len(flat):.1%} of it is zero: it was made sparse, or much was not used."
    sizes = moved.abs()
    level = sizes.max()
    if len(moved) > 8 and float((sizes > 0.99 * level).float().mean()) > 0.5:
        yield f"most of it has the size {float(level):.2g}, as the first step of Adam or signs do: it has signs alone."
    elif len(moved) > 16 * _FEW and len(moved.unique()) <= _FEW:
        yield f"it has {len(moved.unique())} values only: it was quantised."


def _rows(update: Vector) -> Iterator[str]:
    """Rows of a table that moved: the tokens, items or features that the client has."""
    for name, value in update.items():
        if value.ndim != 2 or len(value) < 16:
            continue
        rows = value.abs().sum(dim=1).nonzero().flatten().tolist()
        if 0 < len(rows) < 0.9 * len(value):
            shown = ", ".join(map(str, rows[:12]))
            yield f"of {name} {len(rows)} of {len(value)} rows moved, those of what the client has: {shown}."


def _labels(update: Vector) -> Iterator[str]:
    """Classes that a last bias rose for; one step of a softmax raises those of labels alone, while it is unsure."""
    last = [(name, value) for name, value in update.items() if value.ndim == 1 and 2 <= len(value) <= 1000]
    if not last or last[-1][0] not in [*update][-2:]:
        return
    name, value = last[-1]
    risen = (value > 0).nonzero().flatten().tolist()
    if 0 < len(risen) < len(value):
        yield f"the last bias ({name}) rose for {risen[:12]}: of a classifier, the labels."


def _inputs(found: Tensor | None, update: Vector) -> Iterator[str]:
    if found is not None:
        several = "one example" if len(found) == 1 else f"{len(found)} examples"
        yield f"the first dense layer gives its input away in closed form: {several} of {found.shape[1]} numbers."


def first_inputs(update: Mapping[str, Tensor]) -> Tensor | None:
    """Return inputs of the first dense layer, (N, features), on each of which two neurons agree; ``None``: none.

    The update is the change that training made, or a gradient, by name, in the order of the network.
    """
    names = [*update]
    for place, name in enumerate(names):
        weight = update[name]
        if weight.ndim != 2 or min(weight.shape) < 2:
            continue
        near = sorted(range(len(names)), key=lambda other: (abs(other - place), other < place))
        for other in near:
            bias = update[names[other]]
            if bias.ndim != 1 or len(bias) not in weight.shape or len(bias) < 2:
                continue
            for rows in (weight, weight.T):
                if len(rows) == len(bias) and (found := _agreed(rows.double(), bias.double())) is not None:
                    return found
        return None  # what comes after the first dense layer is given features, not examples
    return None


def _agreed(rows: Tensor, bias: Tensor) -> Tensor | None:
    """Inputs that at least two neurons have in common, those of the strongest first."""
    moved = rows[rows != 0].abs()
    if not len(moved) or float((moved > 0.99 * moved.max()).double().mean()) > 0.5:
        return None  # steps of one size have signs alone
    order = bias.abs().argsort(descending=True)
    order = order[bias[order].abs() > 1e-4 * bias.abs().max()]
    rows, bias = rows[order], bias[order]
    ratios = rows / bias[:, None]
    strong = ratios[bias.abs() > 0.1 * bias.abs().max()]
    together = (strong - strong[0]).norm(dim=1) <= _ALL_SAME * strong[0].norm()
    share = _ALL_SAME if len(strong) > 1 and bool(together.all()) else _SAME
    found: list[Tensor] = []
    while len(bias) > 1 and len(found) < 64:
        same = (ratios - ratios[0]).norm(dim=1) <= share * ratios[0].norm().clamp_min(1e-12)
        if int(same.sum()) > 1:
            found.append((bias[same, None] * rows[same]).sum(0) / bias[same].square().sum())
        if share == _ALL_SAME:
            break
        ratios, rows, bias = ratios[~same], rows[~same], bias[~same]
    return torch.stack(found).float() if found else None


def _bytes(name: str, data: bytes) -> Iterator[str]:
    """Trees in JSON, as XGBoost and CatBoost write them; pickles are not opened."""
    if data[:1] == b"\x80":
        yield f"{name}: {len(data):,} bytes of a pickle, which is not opened."
        return
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        if data:
            yield f"{name}: {len(data):,} bytes."
        return
    thresholds = [*_thresholds(told)]
    if thresholds:
        distinct = sorted(set(thresholds))
        shown = ", ".join(f"{value:g}" for value in distinct[:8])
        yield (
            f"{name}: trees with {len(thresholds)} thresholds, {len(distinct)} of them distinct; each is a value of "
            f"the client's data or lies between two: {shown}."
        )
    counts = [count for count in _numbers(told, ("sum_hessian",)) if count > 0]
    if counts:
        yield f"{name}: the smallest leaf has the weight {min(counts):g}; for squared errors that counts examples."


def _thresholds(told: object) -> Iterator[float]:
    """Split points: of XGBoost in nodes that have children, of CatBoost as borders."""
    for each in _dictionaries(told):
        children = each.get("left_children")
        values = each.get("split_conditions")
        if isinstance(children, list) and isinstance(values, list):
            yield from (float(value) for child, value in zip(children, values, strict=False) if child != -1)
        elif isinstance(border := each.get("border"), (int, float)):
            yield float(border)


def _numbers(told: object, keys: Sequence[str]) -> Iterator[float]:
    for each in _dictionaries(told):
        for key in keys:
            values = each.get(key)
            if isinstance(values, list):
                yield from (
                    float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)
                )


def _dictionaries(told: object) -> Iterator[dict[str, object]]:
    """All objects of a JSON value."""
    left = [told]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            yield each
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(value for value in each if isinstance(value, (dict, list)))
