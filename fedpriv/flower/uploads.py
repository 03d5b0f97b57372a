"""What a reply reveals without the network: its arrays, counts, bytes, and the first dense layer in closed form.

The change of a dense layer's weights is the sum over examples of what its output was off by, times its input; the
change of its bias is the sum of the first factor alone. Of one example, or of a neuron that one example alone moves,
their ratio is the input itself (Phong et al. 2018), whatever network follows and whatever made the arrays: PyTorch lays
weights out as (out, in), Keras, Flax and scikit-learn as (in, out).

That neurons agree on a ratio does not prove that one example moved them. Where the errors of several examples are
proportional (one output, two classes, one label), neurons that are active for all of them agree on a mean. Optimisers
that scale each number by its own history (Adam, RMSprop, Adagrad) leave the input's signs.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpriv.attacks.observation import Observation
from fedpriv.core.errors import some_of
from fedpriv.core.numbers import several
from fedpriv.flower.arrays import STATISTICS, update_of
from fedpriv.flower.folder import MADE, MESSAGES, Exchange, read_arrays
from fedpriv.flower.inference import Leaf, Records, inferred
from fedpriv.gradients import Vector

_SAME = 1e-3  # by which two ratios differ at most, over their norm, that are one input
_ALL_SAME = 1e-2  # where all neurons agree, which chance does not make
_FEW = 256  # values of an array that was quantised
_SHOWN = 6  # arrays that are no updates, each with its first numbers

_Document = tuple[str, bytes, object]  # name, bytes, and what they say as JSON, less the trees that the server sent


@dataclass(frozen=True, eq=False)
class Revealed:
    """What one reply reveals."""

    sentences: tuple[str, ...]
    inputs: Tensor | None = None  # (N, features) that the first layer may have been given; `None`: it tells of none


def revealed(folder: Path, exchange: Exchange, observation: Observation | None, records: Records | None) -> Revealed:
    """Look at one message and its reply; ``records``: those of the client, and others, to infer membership of."""
    arrays = read_arrays(folder / MESSAGES / f"{exchange.stem}.safetensors")
    before, update = _update(exchange, arrays, observation)
    lines = [*_leaves(exchange)]
    if not all(bool(value.isfinite().all()) for value in update.values()):
        lines.append("its update is not finite, as of a training that diverged.")
        update = {}
    if exchange.unattacked:
        lines.append(f"No gradient attack: {exchange.unattacked}.")
    examples = None if observation is None else observation.settings.examples
    documents = _documents(arrays)
    lines += [*_counts(exchange, examples), *_values(arrays, update)]
    lines += [line for document in documents for line in _bytes(*document)]
    found = None
    if exchange.summed:
        lines.append("its arrays leave masked: the server has their sum, and metrics and configs in clear.")
    elif exchange.protected:
        ours = exchange.noise in ("", "privatise")
        bounded = "a mechanism made its arrays: what they tell is bounded by its ledger."
        lines.append(bounded if ours else f"noise of {exchange.noise} is in its arrays.")
    elif update:
        found = first_inputs(update)
        is_whole = all(value.ndim <= 2 for value in update.values())  # no convolution made other features of it
        lines += [*_size(before, update), *_rows(update), *_labels(exchange, update)]
        lines += _inputs(exchange, examples, found, "input" if is_whole else "features")
    if records is not None and not exchange.summed:
        lines += _memberships(update, documents, records)
    return Revealed(tuple(f"{exchange.title}: {line}" for line in lines), found)


def _documents(arrays: Vector) -> list[_Document]:
    """The bytes of a reply."""
    sent = (bytes(value.tolist()) for value in _part(arrays, "sent/").values() if value.dtype == torch.uint8)
    known = {_mark(tree) for data in sent for tree in _dictionaries(_parsed(data)) if "left_children" in tree}
    replied = [
        (name.partition("/")[2], bytes(value.tolist()))
        for name, value in sorted(arrays.items())
        if value.dtype == torch.uint8 and not name.startswith("sent/")
    ]
    return [(name, data, _parsed(data, known)) for name, data in replied]


def _memberships(update: Vector, documents: Sequence[_Document], records: Records) -> Iterator[str]:
    """Which records were trained on, by the update and by trees."""
    splits: dict[int, list[float]] = {}
    for _, _, told in documents:
        for place, threshold in _splits(told):
            splits.setdefault(place, []).append(threshold)
    trees = [leaves for _, _, told in documents for each in _dictionaries(told) if (leaves := _leaves_of(each))]
    if update or splits:
        yield from (f"{text}." for text in inferred(update, splits, trees, records))


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


def _counts(exchange: Exchange, examples: int | None) -> Iterator[str]:
    """Counts of one in metrics; of batches, as many apps give, where the tap saw more examples."""
    for name, values in exchange.replied.items():
        if exchange.source == MADE or not (key := _single(values)):
            continue
        if examples is not None and examples > 1:
            yield f"{name}.{key} = 1, but {examples} examples were trained on: it counts something else."
        else:
            yield f"{name}.{key} = 1: all of it is about one example, if examples are counted."


def _values(arrays: Vector, update: Vector) -> Iterator[str]:
    """Arrays that are no update of anything that was sent."""
    sent, replied = _part(arrays, "sent/"), _part(arrays, "reply/")
    left = {
        name: value
        for name, value in sorted(replied.items())
        if name.partition("/")[2] not in update and value.dtype != torch.uint8 and value.numel()
    }
    same = [name for name, value in left.items() if _is_same(value, sent.get(name.partition("/")[2]))]
    if same:
        yield f"sent back unchanged: {some_of(same, 4)}."
    others = [name for name in left if name not in same]
    yield from (_value(name, left[name]) for name in others[:_SHOWN])
    if more := others[_SHOWN:]:
        yield f"{several(len(more), 'further array')} of what is no update: {some_of(more, 4)}."


def _is_same(value: Tensor, sent: Tensor | None) -> bool:
    return sent is not None and value.dtype == sent.dtype and value.equal(sent)


def _value(name: str, value: Tensor) -> str:
    """What an array looks like that is no update."""
    flat = value.double().flatten()
    whole = bool((flat == flat.round()).all()) and float(flat.min()) >= 0
    shown = ", ".join(f"{number:g}" for number in flat[:6].tolist())
    if name.rpartition(".")[2] in STATISTICS[:2]:
        return f"{name} is a mean or variance of what a layer was given."
    if len(flat) > 1 and float(flat.min()) == float(flat.max()):
        return f"{name} leaves as it is: all {len(flat):,} numbers are {flat[0]:g}."
    if whole and len(flat) > 1 and float(flat.max()) == 1:
        return f"{name} leaves as it is, {len(flat)} flags of which {int(flat.sum())} are 1: {shown}."
    if whole and len(flat) > 1:
        alone = int((flat == 1).sum())
        single = f"; {alone} of {len(flat)} are 1, which is about one example" if alone else ""
        return f"{name} leaves as it is, whole numbers that add up to {flat.sum():g}, as counts do{single}: {shown}."
    return f"{name} is no update of what was sent, and leaves as it is: {shown}."


def _is_single(exchange: Exchange) -> bool:
    return any(map(_single, exchange.replied.values()))


def _single(values: Mapping[str, Any]) -> str:
    """The key of a record that says that the reply is about one example; empty: none does."""
    ones = (key for key, value in values.items() if value == 1 and type(value) is int)
    return next((key for key in ones if "example" in key or "sample" in key), "")


def _size(before: Vector, update: Vector) -> Iterator[str]:
    """Norms, and what compression, clipping of values or an optimiser has left of an update."""
    flat = torch.cat([value.flatten() for value in update.values()])
    start = torch.cat([value.double().flatten() for value in before.values()]).norm() if before else torch.zeros(())
    size, length = several(len(flat), "number"), float(flat.norm())
    yield f"the update of {size} has the norm {length:.3g} (parameters: {float(start):.3g})."
    moved = flat[flat != 0]
    if not len(moved):
        yield "nothing moved, so it reveals nothing."
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
    layers = {layer.weight for layer in dense_layers(update)}
    for name, value in update.items():
        if value.ndim != 2 or len(value) < 16 or name in layers:
            continue
        rows = value.abs().sum(dim=1).nonzero().flatten().tolist()
        if 0 < len(rows) < 0.9 * len(value):
            shown = ", ".join(map(str, rows[:12]))
            yield f"of {name} {len(rows)} of {len(value)} rows moved, those of what the client has: {shown}."


def _labels(exchange: Exchange, update: Vector) -> Iterator[str]:
    """Classes that the bias of the output rose for; a step of a softmax raises those of labels, while it is unsure."""
    layers = dense_layers(update)
    read = {len(layer.rows[0]) for layer in layers}
    last = [layer for layer in layers if len(layer.bias) not in read] or layers
    if exchange.task not in (None, "classes") or not last or not 2 <= len(last[-1].bias) <= 1000:
        return
    columns = [max(value.shape) for value in update.values() if value.ndim == 2 and min(value.shape) == 1]
    if exchange.classes not in (0, len(last[-1].bias)) or len(last[-1].bias) in columns:
        return  # the output layer is not in the reply, or gives one number
    risen = (last[-1].bias > 0).nonzero().flatten().tolist()
    if 0 < len(risen) < len(last[-1].bias):
        what = f"the last bias ({last[-1].bias_name}) rose for {risen[:12]}"
        yield f"{what}: labels of the client, if training was one step of a classifier."


def _inputs(exchange: Exchange, examples: int | None, found: Tensor | None, kind: str) -> Iterator[str]:
    """What the first layer's ratios are: a single example's input for certain, of several only if one moved them."""
    if found is None:
        return
    signs, length = sum(map(_is_signs, found)), f"{found.shape[1]} numbers"
    vectors = len(found) - signs
    if vectors == len(found) == 1 and (examples == 1 or (examples is None and _is_single(exchange))):
        what = f"one example of {length}" if kind == "input" else f"{length}, {kind} of one example"
        yield f"the first dense layer reveals its input in closed form: {what}."
    elif vectors:
        is_what = "it is" if vectors == 1 else "each is"
        yield (
            f"neurons of the first dense layer agree on {several(vectors, 'vector')} of {length}: {is_what} an "
            f"example's {kind}, or a mean of those of several that moved them alike."
        )
    if signs:
        yield (
            f"neurons of the first dense layer agree on {several(signs, 'vector')} of {length}, each 0, 1 or -1: such "
            "an input, or, of steps of Adam or its kin, the signs of one."
        )


def _is_signs(ratio: Tensor) -> bool:
    """Whether an input has signs alone, which optimisers make of any that scale each number by its own history."""
    moved = ratio[ratio.abs() > 1e-2].abs()
    return float(((moved - 1).abs() < _ALL_SAME).double().mean()) > 0.99


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """The change of a dense layer."""

    weight: str  # its name
    rows: Tensor  # (out, in)
    bias_name: str
    bias: Tensor  # (out,)


def dense_layers(update: Mapping[str, Tensor]) -> list[DenseLayer]:
    """Return layers of weights and a bias, in order or by names, whichever side the bias is on."""
    norms = {name for name in update if name.endswith(".weight") and update[name].ndim == 1}
    norms |= {f"{name.removesuffix('.weight')}.bias" for name in norms}
    weights = [name for name, value in update.items() if value.ndim == 2 and min(value.shape) > 1]
    biases = [name for name, value in update.items() if value.ndim == 1 and len(value) > 1 and name not in norms]
    pairs = [*zip(weights, biases, strict=False)]
    if len(weights) != len(biases) or not all(len(update[bias]) in update[name].shape for name, bias in pairs):
        after = dict(zip(update, [*update][1:], strict=False)) if "0" in update else {}  # Keras's, after convolutions
        named = ((name, after.get(name, f"{name.removesuffix('.weight')}.bias")) for name in weights)
        pairs = [(name, bias) for name, bias in named if bias in biases and len(update[bias]) in update[name].shape]
    found = []
    for name, bias in pairs:
        rows = update[name] if len(update[name]) == len(update[bias]) else update[name].T
        found.append(DenseLayer(name, rows, bias, update[bias]))
    return found


def first_layer(update: Mapping[str, Tensor]) -> DenseLayer | None:
    """Return the dense layer that reads no other one's output, or the first of them; ``None``: there is none."""
    layers = dense_layers(update)
    given = {id(layer): {len(other.bias) for other in layers if other is not layer} for layer in layers}
    return next((layer for layer in layers if layer.rows.shape[1] not in given[id(layer)]), next(iter(layers), None))


def first_inputs(update: Mapping[str, Tensor]) -> Tensor | None:
    """Return what may be inputs of the first dense layer, (N, features): two neurons agree on each; ``None``: none."""
    layer = first_layer(update)
    if layer is None:
        return None
    square = layer.rows.shape[0] == layer.rows.shape[1]
    for rows in (layer.rows, layer.rows.T)[: 1 + square]:
        if (found := _agreed(rows.double(), layer.bias.double())) is not None:
            return found
    return None


def _agreed(rows: Tensor, bias: Tensor) -> Tensor | None:
    """Inputs that at least two neurons have in common, those of the strongest first."""
    if not rows.any() or not bias.any() or _has_signs_alone(rows):  # a layer that is normalised moves no bias
        return None
    if len(bias) == 2 and float(bias.sum().abs()) <= _ALL_SAME * float(bias.abs().max()):
        return None  # errors of two classes are opposite, so both agree on any batch
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
        if int(same.sum()) > 1 and not _has_signs_alone(torch.cat([rows[same], bias[same, None]], dim=1)):
            found.append((bias[same, None] * rows[same]).sum(0) / bias[same].square().sum())
        if share == _ALL_SAME:
            break
        ratios, rows, bias = ratios[~same], rows[~same], bias[~same]
    return torch.stack(found).float() if found else None


def _has_signs_alone(values: Tensor) -> bool:
    """Whether most of what moved has one size, as the first step of Adam has."""
    moved = values[values != 0].abs()
    return float((moved > 0.99 * moved.max()).double().mean()) > 0.5


def _bytes(name: str, data: bytes, told: object) -> Iterator[str]:
    """Trees in JSON, as XGBoost and CatBoost write them; pickles are not opened."""
    if data[:1] == b"\x80":
        yield f"{name}: {len(data):,} bytes of a pickle, which is not opened."
        return
    if told is None:
        if data:
            yield f"{name}: {len(data):,} bytes."
        return
    thresholds = [threshold for _, threshold in _splits(told)]
    if thresholds:
        distinct = sorted(set(thresholds))
        shown = ", ".join(f"{value:g}" for value in distinct[:8])
        yield (
            f"{name}: trees with {len(thresholds)} thresholds, {len(distinct)} of them distinct; each is a value of "
            f"the client's data or lies between two: {shown}."
        )
    weights = [each["sum_hessian"] for each in _dictionaries(told) if isinstance(each.get("sum_hessian"), list)]
    counts = [each for leaves in weights for each in leaves if isinstance(each, (int, float)) and 0 < each < math.inf]
    if counts:
        yield f"{name}: the smallest leaf has the weight {min(counts):g}; for squared errors that counts examples."


def _mark(tree: Mapping[str, object]) -> str:
    """What tells a tree of XGBoost from others, whatever its number."""
    return f"{tree.get('split_indices')} {tree.get('split_conditions')}"


def _parsed(data: bytes, known: Collection[str] = ()) -> object:
    """What JSON says, without trees of these marks, which the server sent; ``None``: it is none."""
    try:
        told: object = json.loads(data, object_hook=lambda each: {} if known and _mark(each) in known else each)
    except (ValueError, RecursionError):
        return None
    return told


def _splits(told: object) -> Iterator[tuple[int, float]]:
    """Features and where trees split them: of XGBoost in nodes that have children, of CatBoost as borders."""
    for each in _dictionaries(told):
        children, values = each.get("left_children"), each.get("split_conditions")
        if isinstance(children, list) and isinstance(values, list):
            features = each.get("split_indices")
            features = features if isinstance(features, list) else [-1] * len(values)
            for child, feature, value in zip(children, features, values, strict=False):
                if child != -1:
                    yield int(feature), float(value)
        elif isinstance(border := each.get("border"), (int, float)):
            feature = each.get("float_feature_index")
            yield feature if isinstance(feature, int) else -1, float(border)


def _leaves_of(tree: Mapping[str, object]) -> list[Leaf]:
    """The leaves of one tree as XGBoost or CatBoost writes it; none: it is no tree, or is cut off."""
    try:
        return [*(_grown_leaves(tree) if "left_children" in tree else _oblivious_leaves(tree))]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return []


def _grown_leaves(tree: Mapping[str, Any]) -> Iterator[Leaf]:
    """Of XGBoost: what is below a threshold goes left."""
    left: list[tuple[int, dict[int, tuple[float, float]]]] = [(0, {})]
    for _ in tree["left_children"]:  # each node is come to once, where they are not in a circle
        node, bounds = left.pop()
        if tree["left_children"][node] == -1:
            yield Leaf(bounds, float(tree["sum_hessian"][node]))
            continue
        place, threshold = int(tree["split_indices"][node]), float(tree["split_conditions"][node])
        low, high = bounds.get(place, (-math.inf, math.inf))
        left.append((tree["left_children"][node], {**bounds, place: (low, min(high, threshold))}))
        left.append((tree["right_children"][node], {**bounds, place: (max(low, threshold), high)}))


def _oblivious_leaves(tree: Mapping[str, Any]) -> Iterator[Leaf]:
    """Of CatBoost: all nodes of a depth have one border, and the first one is the last bit of a leaf's number."""
    for number, weight in enumerate(tree["leaf_weights"]):
        bounds: dict[int, tuple[float, float]] = {}
        for depth, split in enumerate(tree["splits"]):
            place, border = int(split["float_feature_index"]), float(split["border"])
            low, high = bounds.get(place, (-math.inf, math.inf))
            above = number >> depth & 1
            bounds[place] = (max(low, border), high) if above else (low, min(high, border))
        yield Leaf(bounds, float(weight))


def _dictionaries(told: object) -> Iterator[dict[str, Any]]:
    """All objects of a JSON value."""
    left = [told]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            yield each
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(value for value in each if isinstance(value, (dict, list)))
