"""What people write in models of their own, against autograd one example at a time: right, or refused by name."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_models import CLASSES, loss, one_by_one
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from fedpriv.core.errors import InputError
from fedpriv.core.randomness import seeded_generators
from fedpriv.gradients import Route, find_route, per_example_gradients
from fedpriv.gradients.dense import Loss
from fedpriv.gradients.per_example import refuse_changes, versions
from tests.cases import in_one_test
from tests.command_line import python

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated"),
]
EXAMPLES = 5
Forward = Callable[..., Tensor]


class Model(nn.Module):
    """A forward pass as a function, with the layers as its keywords."""

    def __init__(self, function: Forward, **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_children()))


class WithScale(nn.Module):
    """A layer behind a factor of its own, run by a function such as a checkpoint."""

    def __init__(self, layer: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.layer, self.run = nn.Parameter(torch.ones(())), layer, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layer, x * self.scale)


class Positions(nn.Module):
    """A layer, and a table of positions for its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def vectors(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, *shape, generator=torch.Generator().manual_seed(95))


def words() -> Tensor:
    return torch.randint(7, (EXAMPLES, 4), generator=torch.Generator().manual_seed(96))


def same_as_one_by_one(model: nn.Module, x: Tensor, function: Loss = loss) -> dict[str, str]:
    """Compare in float64 and return the routes."""
    y = torch.arange(EXAMPLES) % CLASSES
    model = model.double()
    x = x.double() if x.is_floating_point() else x
    before = {name: id(value) for name, value in model.named_parameters()}
    made = per_example_gradients(model, function, x, y)
    assert {name: id(value) for name, value in model.named_parameters()} == before
    trained = dict(model.named_parameters())
    expected = []
    for i in range(EXAMPLES):
        model.zero_grad()
        function(model(x[i : i + 1]), y[i : i + 1]).sum().backward()
        expected.append({n: torch.zeros_like(v) if v.grad is None else v.grad.to_dense() for n, v in trained.items()})
    for name, rows in made.rows(0, EXAMPLES).items():
        assert torch.allclose(rows, torch.stack([row[name] for row in expected]), rtol=1e-9, atol=1e-11), name
    return made.routes


def test_attention_is_a_layer_of_its_own() -> None:
    """It takes named arguments and returns a pair; the other layers of its block stay ghost."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = Model(lambda x, block, out: out(block(x).flatten(1)), block=layer, out=nn.Linear(24, CLASSES))
    assert same_as_one_by_one(model, vectors(3, 8)) == {
        "block.self_attn": "ghost: MultiheadAttention",
        "block.self_attn.out_proj": "ghost: NonDynamicallyQuantizableLinear",
        "block.linear1": "ghost: Linear",
        "block.linear2": "ghost: Linear",
        "block.norm1": "ghost: LayerNorm",
        "block.norm2": "ghost: LayerNorm",
        "out": "ghost: Linear",
    }


def test_an_attention_mask_is_the_same_for_all_examples() -> None:
    mask = torch.triu(torch.full((3, 3), -torch.inf, dtype=torch.float64), 1)
    model = Model(
        lambda x, body, out: out(body(x, x, x, attn_mask=mask)[0].flatten(1)),
        body=nn.MultiheadAttention(4, 2, batch_first=True),
        out=nn.Linear(12, CLASSES),
    )
    assert same_as_one_by_one(model, vectors(3, 4))["body"] == "ghost: MultiheadAttention"


RECURRENT = {
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
    "layers in both directions": lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True),
    "without biases, projected": lambda: nn.LSTM(
        3, 4, 2, bias=False, batch_first=True, bidirectional=True, proj_size=2
    ),
    "projected": lambda: nn.LSTM(3, 4, batch_first=True, proj_size=2),
    "gru": lambda: nn.GRU(3, 4, 2, bias=False, batch_first=True, bidirectional=True),
    "tanh": lambda: nn.RNN(3, 4, 2, batch_first=True),
    "relu": lambda: nn.RNN(3, 4, bias=False, nonlinearity="relu", batch_first=True, bidirectional=True),
    "gru, dropout": lambda: nn.GRU(3, 4, 2, batch_first=True, dropout=0.5).eval(),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str) -> None:
    """What comes out at all steps, and the last states, whose second axis counts the examples."""

    def function(x: Tensor, body: nn.RNNBase, out: nn.Module) -> Tensor:
        steps, states = body(x)
        ends = [states] if isinstance(states, Tensor) else states
        return out(torch.cat([steps.flatten(1), *(end.transpose(0, 1).flatten(1) for end in ends)], dim=1))

    model = Model(function, body=RECURRENT[name](), out=nn.LazyLinear(CLASSES))
    model(vectors(6, 3))
    routes = same_as_one_by_one(model, vectors(6, 3))
    assert {way.partition(":")[0] for way in routes.values()} == {"ghost"}


def test_recurrent_layers_go_along_the_first_axis() -> None:
    model = Model(
        lambda x, body, out: out(body(x.mT.movedim(1, 0))[0][-1]), body=nn.LSTM(4, 3), out=nn.Linear(3, CLASSES)
    )
    assert same_as_one_by_one(model, vectors(4, 6))["body"] == "ghost: LSTM"


def test_dropout_between_recurrent_layers_draws_what_torch_draws() -> None:
    model = Model(
        lambda x, body, out: out(body(x)[0][:, -1]),
        body=nn.LSTM(3, 40, 3, batch_first=True, dropout=0.5),
        out=nn.Linear(40, CLASSES),
    ).double()
    x, y = vectors(6, 3).double(), torch.arange(EXAMPLES) % CLASSES
    with seeded_generators(1, x.device):
        sums = per_example_gradients(model, loss, x, y).combine(torch.ones(EXAMPLES, dtype=x.dtype))
    with seeded_generators(1, x.device):
        loss(model(x), y).sum().backward()
    for name, value in model.named_parameters():
        assert torch.allclose(sums[name], value.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("padding", [None, -1])
@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_bags_of_words(mode: str, padding: int | None) -> None:
    """Shares of each word count in sums only; an example may be padding alone."""

    def function(x: Tensor, body: nn.Module, out: nn.Module) -> Tensor:
        shares = (x + 1).double() if body.mode == "sum" else None
        return out(body(x, per_sample_weights=shares))

    model = Model(function, body=nn.EmbeddingBag(9, 4, mode=mode, padding_idx=padding), out=nn.Linear(4, CLASSES))
    words = torch.randint(9, (EXAMPLES, 6), generator=torch.Generator().manual_seed(3))
    words[0] = 8
    assert same_as_one_by_one(model, words)["body"] == "ghost: EmbeddingBag"


@in_one_test("body", [nn.GRU(3, 4, batch_first=True), nn.LSTM(3, 4, batch_first=True, bias=False)])
def test_packed_sequences_are_written_out(body: nn.RNNBase) -> None:
    def function(x: Tensor, body: nn.Module, out: nn.Module) -> Tensor:
        lengths = 2 + (x[:, :, 0] > 0).sum(dim=1).clamp(max=4)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        ends = body(packed)[1]
        return out((ends if isinstance(ends, Tensor) else ends[0])[-1])

    model = Model(function, body=body, out=nn.Linear(4, CLASSES))
    reason = f"of body ({type(body).__name__}) does not count the examples, one example after the other"
    assert reason in same_as_one_by_one(model, vectors(6, 3))[""]


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_called_again_and_again(kind: type[nn.RNNCellBase]) -> None:
    def function(x: Tensor, cell: nn.Module, out: nn.Module) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = cell(x[:, t], state)
        return out(state if isinstance(state, Tensor) else state[0])

    model = Model(function, cell=kind(3, 4), out=nn.Linear(4, CLASSES))
    assert same_as_one_by_one(model, vectors(6, 3))["cell"] == f"ghost: {kind.__name__}"


def test_deciding_by_numbers() -> None:
    """torch cannot map a module over examples that decides by their numbers; one comes after the other then."""

    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([row * self.factor if float(row.sum()) > 0 else row - self.factor for row in x])

    model = nn.Sequential(Decides(), nn.Linear(6, CLASSES))
    assert (
        same_as_one_by_one(model, vectors(6))["0"] == "dense: Decides (stack has no rule), one example after the other"
    )


def test_mixture_of_experts() -> None:
    def function(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
        chosen = x[:, 0] > 0
        result = x.new_zeros(len(x), CLASSES)
        result = result.index_put((chosen.nonzero()[:, 0],), first(x[chosen]))
        return result.index_put(((~chosen).nonzero()[:, 0],), second(x[~chosen]))

    model = Model(function, first=nn.Linear(6, CLASSES), second=nn.Linear(6, CLASSES))
    assert "does not count the examples" in same_as_one_by_one(model, vectors(6))[""]


def test_a_gradient_inside_of_the_forward_pass() -> None:
    """The weight enters once more, behind the back of its layer: by the derivative of the layer."""

    def function(x: Tensor, body: nn.Module, out: nn.Module) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(torch.tanh(body(x)).sum(), x, create_graph=True)
        return out(slope)

    model = Model(function, body=nn.Linear(6, 6), out=nn.Linear(6, CLASSES))
    assert "used by something else than a function of torch" in same_as_one_by_one(model, vectors(6))[""]


def test_one_module_under_two_names() -> None:
    layer = nn.Linear(6, 6)
    model = Model(
        lambda x, first, second, out: out(second(torch.tanh(first(x)))),
        first=layer,
        second=layer,
        out=nn.Linear(6, CLASSES),
    )
    model.function = lambda x, first, out: out(layer(torch.tanh(first(x))))
    assert set(same_as_one_by_one(model, vectors(6)).values()) == {"ghost: Linear"}


@pytest.mark.parametrize("bias", [True, False])
def test_an_embedding_that_is_also_the_last_layer(bias: bool) -> None:
    table = nn.Embedding(7, 6)
    last = nn.Linear(6, 7, bias=bias)
    last.weight = table.weight
    model = Model(lambda x, table, last: last(table(x).mean(dim=1))[:, :CLASSES], table=table, last=last)
    routes = same_as_one_by_one(model, words())
    assert routes == {"table": "ghost: Embedding", "last": "ghost: Linear"}


@in_one_test("shape", [(4,), (1, 4)])
def test_positions_that_are_looked_up_once(shape: tuple[int, ...]) -> None:
    """Each example has its own share of their gradient, also in a batch as large as a sequence is long."""
    places = torch.arange(4).reshape(shape)
    layers = {"table": nn.Embedding(7, 6), "places": nn.Embedding(4, 6), "out": nn.Linear(6, CLASSES)}
    model = Model(lambda x, table, places, out: out((table(x) + places(where)).tanh().mean(dim=1)), **layers)
    where = places
    ghost = {"table": "ghost: Embedding", "places": "ghost: Embedding", "out": "ghost: Linear"}
    assert same_as_one_by_one(model, words()) == ghost
    for examples in (1, 4, 5):
        x, y = words()[:1].expand(examples, -1), torch.arange(examples) % CLASSES
        route = find_route(model, loss, x, y)
        made = per_example_gradients(model, loss, x, y, route=route)
        assert made.routes == ghost
        expected = one_by_one(model, x, y)
        assert all(torch.allclose(rows, expected[name]) for name, rows in made.rows(0, examples).items())


def of_all(x: Tensor, table: nn.Module, out: nn.Module) -> Tensor:
    """Entries of a table of as many entries as the batch has examples, all of them for each."""
    return out((x + table(torch.arange(EXAMPLES)).mean(dim=0)).tanh())


def added_up(x: Tensor, table: nn.Module, out: nn.Module) -> Tensor:
    """The sum over all axes of what was looked up."""
    return out((x + table(torch.arange(3)[None]).sum(dim=(0, 1))).tanh())


def put_beside(x: Tensor, table: nn.Module, out: nn.Module) -> Tensor:
    """One entry, stretched for all examples and squared."""
    return out(torch.cat([x, table(torch.arange(1)).expand(len(x), -1) ** 2], dim=1)[:, :6])


def of_own(x: Tensor, table: nn.Module, out: nn.Module) -> Tensor:
    """A layer applied to what is not of the batch, and happens to be as long."""
    return out((x + table(torch.ones(EXAMPLES, 6, dtype=x.dtype)).mean(dim=0)).tanh())


@in_one_test(
    ("function", "table"),
    [
        (of_all, nn.Embedding(EXAMPLES, 6)),
        (added_up, nn.Embedding(3, 6)),
        (put_beside, nn.Embedding(3, 6)),
        (of_own, nn.Linear(6, 6)),
    ],
)
def test_tables_that_all_examples_share(function: Forward, table: nn.Module) -> None:
    """What is computed from parameters alone passes each example's gradient on to them."""
    model = Model(function, table=table, out=nn.Linear(6, CLASSES))
    assert all(way.startswith("ghost: ") for way in same_as_one_by_one(model, vectors(6)).values())


@in_one_test("kind", ["weight_norm", "old weight_norm", "orthogonal", "pruned"])
def test_weights_that_are_computed(kind: str) -> None:
    layer = nn.Linear(6, 6).double()
    match kind:
        case "weight_norm":
            nn.utils.parametrizations.weight_norm(layer)
        case "old weight_norm":
            nn.utils.weight_norm(layer)
        case "orthogonal":
            nn.utils.parametrizations.orthogonal(layer)
        case "pruned":
            prune.l1_unstructured(layer, "weight", amount=0.5)
    routes = same_as_one_by_one(nn.Sequential(layer, nn.Tanh(), nn.Linear(6, CLASSES)), vectors(6))
    assert all(way.startswith("ghost: ") for way in routes.values())


class Summed(nn.Module):
    """A product of examples and of a weight, written as a sum over letters."""

    def __init__(self, equation: str, *shape: int) -> None:
        super().__init__()
        self.equation, self.weight = equation, nn.Parameter(torch.randn(shape) / 3)

    def forward(self, x: Tensor) -> Tensor:
        both = (x, self.weight) if "b" in self.equation.partition(",")[0] else (self.weight, x)
        return torch.einsum(self.equation, *both).flatten(1).tanh()


@in_one_test(
    ("equation", "shape"),
    [
        ("btd,dhk->bthk", (4, 2, 2)),  # heads of attention: one matrix
        ("oig,big->bo", (5, 3, 4)),
        ("bti,ti->bt", (3, 4)),
        ("bti,tio->bot", (3, 4, 2)),  # a matrix for each position
        ("bti,tso->bisot", (3, 2, 2)),  # nothing is summed
        ("bti,j->btij", (3,)),
    ],
)
def test_sums_over_letters(equation: str, shape: tuple[int, ...]) -> None:
    """What weights are multiplied with has rules, whatever order their axes have."""
    model = nn.Sequential(Summed(equation, *shape), nn.LazyLinear(CLASSES))
    model(vectors(3, 4))
    routes = same_as_one_by_one(model, vectors(3, 4))
    assert routes["0"] == "ghost: Summed"


def test_sums_over_letters_without_a_rule() -> None:
    """A letter that stands twice is a diagonal, one that only one of both has is added up."""
    model = nn.Sequential(Summed("bti,ii->bt", 4, 4), nn.LazyLinear(CLASSES))
    model(vectors(3, 4))
    assert same_as_one_by_one(model, vectors(3, 4))["0"].startswith("dense: Summed")


class Filtered(nn.Module):
    """A filter that is computed from complex numbers, and laid over the spectrum of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.rates, self.phases = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        response = torch.fft.rfft(torch.exp(torch.complex(-self.rates, self.phases)[:, None] * torch.arange(8)).real)
        return torch.fft.irfft(torch.fft.rfft(x) * response).flatten(1)


def test_complex_numbers_computed_from_parameters() -> None:
    model = nn.Sequential(Filtered(), nn.Linear(24, CLASSES))
    assert same_as_one_by_one(model, vectors(3, 8))["0"] == "ghost: Filtered"


def test_maps_of_three_dimensions() -> None:
    """Also in groups; float32 is computed another way."""
    for groups, precision in ((1, torch.float64), (2, torch.float64), (2, torch.float32)):
        layers = (nn.Conv3d(2, 4, (2, 3, 1), stride=2, padding=1, groups=groups), nn.Flatten(), nn.LazyLinear(CLASSES))
        model, x = nn.Sequential(*layers), vectors(2, 4, 5, 3)
        model(x)
        if precision == torch.float64:
            assert same_as_one_by_one(model, x)["0"] == "ghost: Conv3d"
            continue
        y = torch.arange(EXAMPLES) % CLASSES
        made, expected = per_example_gradients(model, loss, x, y), one_by_one(model, x, y)
        for name, rows in made.rows(0, EXAMPLES).items():
            assert torch.allclose(rows, expected[name].float(), rtol=1e-4, atol=1e-6), name


class Skipping(nn.Module):
    """Leaves its layer out by chance, for a whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand([]) < 0.4 else self.layer(x)


def test_layers_that_are_left_out_by_chance() -> None:
    """Each example draws on its own then; no step refuses what was drawn."""
    model, x, y = nn.Sequential(Skipping(), nn.Linear(6, CLASSES)), vectors(6), torch.arange(EXAMPLES) % CLASSES
    route = find_route(model, loss, x, y)
    assert route.dense == "it draws at random which functions it calls"
    with torch.random.fork_rng(devices=[]):
        for seed in range(5):
            torch.manual_seed(seed)
            norms = per_example_gradients(model, loss, x, y, route=route).norms(("0.layer.weight",))
            assert torch.isfinite(norms).all()


@in_one_test("dense", ["", "for the test"])
def test_several_threads_may_look_at_one_model(dense: str) -> None:
    """Both see all of it, and it is as it was afterwards."""
    model, x, y = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)), vectors(6), torch.zeros(5).long()
    route = Route(dense) if dense else None

    def norms(_: int) -> torch.Tensor:
        return per_example_gradients(model, loss, x, y, route=route).norms()

    expected = norms(0)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(norms, range(8)))
    assert all(torch.equal(each, expected) for each in found)
    assert {type(value) for value in model.parameters()} == {nn.Parameter}


def test_a_forward_that_was_replaced() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, CLASSES))
    layer = model[0]
    layer.forward = lambda x: 2 * functional.linear(x, layer.weight, layer.bias)
    assert same_as_one_by_one(model, vectors(6))["0"] == "ghost: Linear"


@in_one_test("hung_on", ["parameter", "layer", "layer before", "container", "activation"])
def test_hooks_on_gradients_are_part_of_the_model(hung_on: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Tanh(), nn.Sequential(nn.Linear(6, CLASSES)))
    match hung_on:
        case "parameter":
            model[0][0].weight.register_hook(lambda gradient: 2 * gradient)
        case "layer":
            model[2][0].register_full_backward_hook(lambda module, before, after: (2 * before[0],))
        case "layer before":
            model[0][0].register_full_backward_pre_hook(lambda module, after: (2 * after[0],))
        case "container":
            model[2].register_full_backward_hook(lambda module, before, after: (2 * before[0],))
        case "activation":
            model[1].register_forward_hook(lambda module, given, result: result.register_hook(lambda g: 2 * g) and None)
    same_as_one_by_one(model, vectors(6))


def test_a_hook_for_all_modules() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, CLASSES))
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, result: 2 * result)
    try:
        same_as_one_by_one(model, vectors(6))
    finally:
        handle.remove()


@pytest.mark.parametrize("ghost", [True, False])
def test_a_loss_that_holds_on_to_parameters(ghost: bool) -> None:
    """Weight decay inside of the loss; dense gradients, of stand-ins for the parameters, would not see it."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    if not ghost:
        model.register_parameter("scale", nn.Parameter(torch.ones(())))
        model[2].weight.register_hook(lambda gradient: gradient.clone())
    routes = same_as_one_by_one(model, vectors(6), lambda out, y: loss(out, y) + model[0].weight.square().sum())
    assert ghost or routes[""].endswith("one example after the other")


def test_several_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, CLASSES), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"left": self.left(x), "right": self.right(x)}

    routes = same_as_one_by_one(Two(), vectors(6), lambda out, y: loss(out["left"], y))
    assert routes == {"left": "ghost: Linear", "right": "unused: Linear"}


@pytest.mark.parametrize("before", [True, False])
def test_checkpointing(before: bool) -> None:
    model = Model(
        lambda x, first, body, out: out(checkpoint(body, first(x) if before else x, use_reentrant=False)),
        first=nn.Linear(6, 6),
        body=nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
        out=nn.Linear(6, CLASSES),
    )
    assert same_as_one_by_one(model, vectors(6))["body.0"] == "ghost: Linear"


class Reversed(torch.autograd.Function):
    """A block whose backward pass runs it again, as those of reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.block = block
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.block(x).backward(errors[0])
        return x.grad, None


def reentrant(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


def layers(**others: nn.Module) -> dict[str, nn.Module]:
    return {"first": nn.Linear(6, 6), "body": nn.Linear(6, 6), "out": nn.Linear(6, CLASSES), **others}


def frozen(**others: nn.Module) -> dict[str, nn.Module]:
    """Nothing is trained but ``body``, as under adapters."""
    made = layers(**others)
    for name in ("first", "out"):
        made[name].requires_grad_(False)
    return made


# A backward pass of the model's own adds gradients that are no part of autograd's graph.
HIDDEN: dict[str, tuple[Forward, dict[str, nn.Module], Callable[[], Tensor]]] = {
    "between": (lambda x, first, body, out: out(reentrant(body, first(x))), layers(), lambda: vectors(6)),
    "frozen around": (
        lambda x, first, body, out: out(reentrant(body, first(x).requires_grad_())), frozen(), lambda: vectors(6)
    ),
    "no rule": (
        lambda x, first, body, out: out(reentrant(body, first(x).requires_grad_())),
        frozen(body=nn.Sequential(nn.Linear(6, 6), nn.PReLU())),
        lambda: vectors(6),
    ),
    "inside a layer without a rule": (
        lambda x, first, body, out: out(body(first(x))),
        layers(body=WithScale(nn.Linear(6, 6), reentrant)),
        lambda: vectors(6),
    ),
    "a weight that is used outside, too": (
        lambda x, first, body, out: out(first(x) + reentrant(lambda h: functional.linear(h, first.weight), body(x))),
        layers(),
        lambda: vectors(6),
    ),
    "positions that are looked up once": (
        lambda x, first, body, out: out(reentrant(body, first(x) + body.table(torch.arange(4))).flatten(1)),
        layers(first=nn.Embedding(7, 3), body=Positions(), out=nn.Linear(12, CLASSES)),
        words,
    ),
    "reversible": (lambda x, first, body, out: out(Reversed.apply(first(x), body)), layers(), lambda: vectors(6)),
}  # fmt: skip


@pytest.mark.parametrize("case", HIDDEN)
def test_a_backward_pass_of_the_models_own(case: str) -> None:
    function, parts, x = HIDDEN[case]
    model = Model(function, **parts)
    assert same_as_one_by_one(model, x())[""].endswith(", one example after the other")
    y = torch.arange(EXAMPLES) % CLASSES
    route = find_route(model, loss, x().double() if x().is_floating_point() else x(), y)
    assert "reentrant checkpoint" in route.dense or case == "inside a layer without a rule"


class Doubled(torch.autograd.Function):
    """A function written in Python that runs no backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> Tensor:
        return 2 * errors[0]


def test_a_function_of_the_models_own_hides_nothing() -> None:
    """The weight that two layers share gets one gradient, under two names."""
    table, last = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    last.weight = table.weight
    model = Model(lambda x, table, last: last(Doubled.apply(table(x))).sum(dim=1)[:, :CLASSES], table=table, last=last)
    assert set(same_as_one_by_one(model, words()).values()) == {"ghost: Embedding", "ghost: Linear"}


def test_parameters_that_a_list_holds() -> None:
    """A stand-in for a parameter is given to the function that takes it, wherever it was held."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, CLASSES)), nn.Parameter(torch.zeros(CLASSES))
            self.held = [self.weight]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.held[0] + self.bias

    assert same_as_one_by_one(Listed(), vectors(6)) == {"": "ghost: Listed"}


class Scored(nn.Module):
    """A vector gives each place of a graph a score, and its neighbours' messages are added up by it."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.out = nn.Parameter(torch.randn(6)), nn.Linear(6, CLASSES)
        self.register_buffer("ends", torch.tensor([0, 1, 1, 2, 3, 0]))

    def forward(self, x: Tensor) -> Tensor:
        h = x.tanh()
        messages = h[:, self.ends] * (h[:, self.ends] @ self.score).sigmoid()[..., None]
        return self.out(
            torch.zeros_like(h).index_add(1, self.ends.flip(0), messages).amax(1) * (h[:, 0] @ self.score)[:, None]
        )


def test_products_with_a_vector() -> None:
    assert same_as_one_by_one(Scored(), vectors(4, 6)) == {"": "ghost: Scored", "out": "ghost: Linear"}


def test_data_parallel() -> None:
    same_as_one_by_one(nn.DataParallel(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES))), vectors(6))


def test_compiled_parts() -> None:
    body = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), backend="eager")
    same_as_one_by_one(nn.Sequential(body, nn.Linear(6, CLASSES)), vectors(6))


def test_scripted_parts() -> None:
    body = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    assert "TorchScript" in same_as_one_by_one(nn.Sequential(body, nn.Linear(6, CLASSES)), vectors(6))[""]


def test_channels_last() -> None:
    layers = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.LazyLinear(5)
    )
    x = vectors(2, 6, 6)
    layers(x)
    layers, x = layers.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    assert all(route.startswith("ghost") for route in same_as_one_by_one(layers, x).values())


def test_nothing_of_a_model_that_was_cut_off_is_claimed() -> None:
    def function(x: Tensor, idle: nn.Module, cut: nn.Module, partly: nn.Module, out: nn.Module) -> Tensor:
        with torch.no_grad():
            start = idle(x)
        inner = partly(start)
        return out(cut(x).detach() + inner * inner.detach())

    model = Model(function, **{name: nn.Linear(6, 6) for name in ("idle", "cut", "partly")}, out=nn.Linear(6, CLASSES))
    assert same_as_one_by_one(model, vectors(6)) == {
        "idle": "unused: Linear",
        "cut": "unused: Linear",
        "partly": "ghost: Linear",
        "out": "ghost: Linear",
    }


def test_sparse_embedding() -> None:
    model = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Flatten(), nn.Linear(12, CLASSES))
    assert same_as_one_by_one(model, words())["0"] == "ghost: Embedding"


def test_routes_are_printed() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, CLASSES).requires_grad_(False))
    made = per_example_gradients(model, loss, vectors(6), torch.zeros(EXAMPLES, dtype=torch.long))
    assert str(made).splitlines() == [
        "gradients of 5 examples, 43 parameters each",
        "  0: ghost: Linear",
        "  1: ghost: PReLU",
        "  2: frozen: Linear",
    ]


class Remembers(nn.Module):
    """Keeps a running mean of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        return self.out(x - self.mean)


def test_buffers_that_take_each_others_place_are_told_apart() -> None:
    """The second of two new ones would have the number of the first of all, which is gone by then."""
    model = Remembers()
    before = versions({"": model})
    for _ in range(10):
        model.mean = torch.zeros(6)
        with pytest.raises(InputError, match="changes mean while it runs"):
            refuse_changes({"": model}, before)


class Forgets(Remembers):
    """Takes away what it would have kept."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = None
        return self.out(x)


@in_one_test(
    ("model", "x", "message"),
    [
        (Forgets(), vectors(6), "while it runs, and no noise protects what it may keep"),
        (Remembers(), vectors(6), r"layer \(the model\) \(Remembers\) changes mean while it runs"),
        (
            nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, CLASSES))),
            vectors(6),
            r"layer 0\.parametrizations\.weight\.0 \(_SpectralNorm\) changes .*_u while it runs",
        ),
        (
            nn.Sequential(nn.Embedding(7, 3, max_norm=0.1), nn.Flatten(), nn.Linear(12, CLASSES)),
            words(),
            r"layer 0 \(Embedding\) changes 0.weight while it runs",
        ),
        (
            Model(lambda x, out: out(x.mul_(2)), out=nn.Linear(6, CLASSES)),
            vectors(6),
            "Model changes its input in place",
        ),
        (nn.Sequential(nn.LazyLinear(CLASSES)), vectors(6), r"layer 0 \(LazyLinear\) has no shape yet"),
        (
            Model(lambda x, out: out(x.bfloat16()), out=nn.Linear(6, CLASSES).bfloat16()),
            vectors(6),
            "parameters of torch.bfloat16; allowed: torch.float32, torch.float64",
        ),
    ],
)
def test_refused_by_name(model: nn.Module, x: Tensor, message: str) -> None:
    y = torch.zeros(EXAMPLES, dtype=torch.long)
    with pytest.raises(InputError, match=message) as caught:
        per_example_gradients(model.train(), loss, x.clone(), y)
    assert "\n" not in str(caught.value)


def test_the_oracle_agrees_with_itself() -> None:
    """The comparison above against the other tests' one: the same numbers for a model without tricks."""
    model, x, y = nn.Linear(6, CLASSES), vectors(6), torch.arange(EXAMPLES) % CLASSES
    assert same_as_one_by_one(model, x) == {"": "ghost: Linear"}
    rows = per_example_gradients(model, loss, x.double(), y).rows(0, EXAMPLES)
    assert all(torch.allclose(rows[name], value) for name, value in one_by_one(model, x, y).items())


ATTENTION = """
import torch
from torch import nn
from fedpriv.gradients.dense import dense_gradients

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0].mean(1)

x, y = torch.randn(3, 4, 16), torch.tensor([0, 1, 2])
print(dense_gradients(Attention(), lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"), x, y, "asked"))
"""


def test_attention_prints_no_warning_to_developers_of_torch(tmp_path: Path) -> None:
    (tmp_path / "attention.py").write_text(ATTENTION)
    done = python("attention.py", cwd=tmp_path)
    assert done.stdout.startswith("gradients of 3 examples")
    assert "one by one" not in done.stdout, "the mapped route, which warned"
    assert done.stderr == ""
