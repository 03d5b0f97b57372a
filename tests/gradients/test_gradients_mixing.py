"""Models that mix examples, or keep some, are refused before they train; those that draw random numbers are not."""

import copy
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gradient_models import CASES, CLASSES, Attention, build, loss
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fedpriv.gradients.mixing
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import generator_states, seeded_generators
from fedpriv.gradients import per_example_gradients, refuse_mixed_examples
from tests.cases import in_one_test

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
EXAMPLES = 13
WIDTH = 8  # of what the two layers have between them; no number of examples that is tried
CPU = torch.device("cpu")
Between = Callable[[nn.Module, Tensor], Tensor]


class Model(nn.Module):
    """Two layers, and between them a function of the model and of what it has computed so far."""

    def __init__(self, between: Between, **kept: object) -> None:
        super().__init__()
        self.between = between
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES)
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.between(self, self.first(x))))


class Dense(Model):
    """The same with a parameter of its own, so that gradients are computed from each example alone."""

    def __init__(self, between: Between, **kept: object) -> None:
        super().__init__(between, **kept)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scale * x)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Weights and inputs are the same every time, so that no test depends on luck."""
    with seeded_generators(97, CPU):
        yield


def vectors(examples: int = EXAMPLES) -> Tensor:
    return torch.randn(examples, 6, generator=torch.Generator().manual_seed(95))


def labels(examples: int = EXAMPLES) -> Tensor:
    return torch.arange(examples) % CLASSES


def refused(model: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        refuse_mixed_examples(model.train(), loss, vectors(), labels(), [torch.full((6,), -1.0)])
    assert "\n" not in str(caught.value)


def accepted(model: nn.Module) -> None:
    refuse_mixed_examples(model.train(), loss, vectors(), labels(), [torch.full((6,), -1.0)])


# ---- one example acts on another in the same batch ------------------------------------------------------------------


def mixed(h: Tensor, order: Tensor, share: float = 0.7) -> Tensor:
    return share * h + (1 - share) * h[order]


def by_python(model: nn.Module, h: Tensor) -> Tensor:
    order = list(range(len(h)))
    random.shuffle(order)
    return mixed(h, torch.tensor(order))


def by_numpy(model: nn.Module, h: Tensor) -> Tensor:
    order = torch.from_numpy(np.random.permutation(len(h)))  # noqa: NPY002 - the global generator is meant
    return mixed(h, order, np.random.beta(1, 1))  # noqa: NPY002


def noise_by_numpy(model: nn.Module, h: Tensor) -> Tensor:
    return h + torch.from_numpy(np.random.randn(*h.shape)).float()  # noqa: NPY002


def sometimes(model: nn.Module, h: Tensor) -> Tensor:
    return mixed(h, torch.randperm(len(h))) if random.random() < 0.5 else h


def by_hand(model: nn.Module, h: Tensor) -> Tensor:
    return (h - h.mean(dim=0)) / (1e-3 + h.var(dim=0, unbiased=False)).sqrt()


def of_limited_capacity(model: nn.Module, h: Tensor) -> Tensor:
    """Experts as in a mixture: of those who choose the same one only the first four are computed."""
    expert = h[:, 0] > 0
    place = torch.stack([(expert[:k] == expert[k]).sum() for k in range(len(h))])
    return torch.where((place < 4)[:, None], h, 0.0)


MIXING: dict[str, Between] = {
    "mixup": lambda model, h: mixed(h, torch.randperm(len(h))),
    "mixup by numpy": by_numpy,
    "mixup by Python": by_python,
    "mixup sometimes": sometimes,
    "statistics by hand": by_hand,
    "roll": lambda model, h: h.roll(1, dims=0),
    "attention": lambda model, h: torch.softmax(h @ h.T, dim=1) @ h,
    "sorted": lambda model, h: h[h.sum(dim=1).argsort()],
    "a billionth": lambda model, h: h + 1e-9 * h.mean(dim=0),
    "capacity": of_limited_capacity,
    "softmax": lambda model, h: h.softmax(dim=0),
    "decision": lambda model, h: h * float(h.detach().max()),
    "batch size": lambda model, h: h / len(h),
    "batch size, a little": lambda model, h: h * (1 + 1e-4 * len(h)),
}


@in_one_test("name", MIXING)
@pytest.mark.parametrize("hidden", [False, True])
def test_mixing_is_found(name: str, hidden: bool) -> None:
    """Also beside dropout and in training mode only, where gradients never repeat and evaluation shows nothing."""
    model = Model(MIXING[name])
    if hidden:
        model.between = lambda model, h: MIXING[name](model, h) if model.training else h
        model.last = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, CLASSES))
    refused(model, r"layer first \(Linear\) for one example depends on the others of its batch")


DRAWING: dict[str, Between] = {
    "dropout": lambda model, h: functional.dropout(h, 0.5),
    "rrelu": lambda model, h: functional.rrelu(h, training=True),
    "noise": lambda model, h: h + torch.normal(torch.zeros(h.shape), 0.1),
    "stochastic depth": lambda model, h: h * torch.empty(len(h), 1).bernoulli_(0.5),
    "uniform": lambda model, h: h + torch.rand(len(h), 1) + torch.empty(len(h), 1).uniform_(-1, 1),
    "Gumbel": lambda model, h: functional.gumbel_softmax(h),
    "layer left out by torch": lambda model, h: h * torch.randint(0, 2, (len(h), 1)),
    "category": lambda model, h: h * (1 + torch.distributions.Categorical(logits=h).sample()[:, None]),
    "counts": lambda model, h: h * torch.poisson(torch.ones(h.shape)) + torch.empty(h.shape).geometric_(0.5),
    "heavy tails": lambda model, h: h * torch.empty(len(h), 1).cauchy_() * torch.empty(len(h), 1).log_normal_(),
    "attention": lambda model, h: functional.scaled_dot_product_attention(*3 * (h.view(-1, 1, 4, 2),), dropout_p=0.2),
    "layer left out": lambda model, h: h if random.random() < 0.5 else 2 * h,
}


@in_one_test("name", DRAWING)
def test_the_size_of_a_batch_is_found_beside_chance_in_training_mode(name: str) -> None:
    """Evaluation shows nothing of it, and a batch draws other numbers than one of its examples."""

    def between(share: float) -> Between:
        return lambda model, h: DRAWING[name](model, h / share).reshape(h.shape) if model.training else h

    accepted(Model(between(2.0)))
    refused(Model(lambda model, h: between(len(h))(model, h)), "alone it is another")
    if name in SOUND:
        refused(Dense(lambda model, h: between(len(h))(model, h)), "alone it is another")


class Padding(Model):
    """Gives flat images the batch's first one."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.amax(dim=1, keepdim=True) == x.amin(dim=1, keepdim=True)
        return super().forward(torch.where(flat, x[:1], x))


def test_mixing_on_flat_images_only_is_found() -> None:
    refused(Padding(lambda model, h: h), r"layer first \(Linear\) for one example depends on the others of its batch")


class Cut(Model):
    """As many steps as the longest example has, as of texts: no step is taken where all have ended."""

    def __init__(self) -> None:
        super().__init__(lambda model, h: h)
        self.first = nn.GRU(1, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        longest = int((x != -1).sum(dim=1).max().clamp(min=1))
        return self.last(self.first(x[:, :longest, None])[1][0])


def test_a_model_that_takes_fewer_steps_where_all_examples_are_short_is_found() -> None:
    """One long example would decide whether the gradients of all others can be computed, or count as zero."""
    refused(Cut(), "Cut works otherwise on these examples")


class Settles(nn.Module):
    """Repeats a layer until all examples have settled, as deep equilibrium networks do: the slowest decides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        entered = self.first(x)
        state = torch.zeros_like(entered)
        for _ in range(60):
            before, state = state, torch.tanh(0.3 * self.middle(state) + entered)
            if (state - before).abs().max() < 1e-4:
                break
        return self.last(state)


def test_a_model_that_repeats_a_layer_until_all_examples_have_settled_is_found() -> None:
    """Random examples mostly take the same number of steps, one of NaN takes all of them."""
    for seed in range(5):
        torch.manual_seed(seed)
        refused(Settles(), r"Settles works otherwise .* one example, all NaN, decides whether")


@pytest.mark.parametrize("order", [lambda h: h.sum(dim=1).argsort(), lambda h: torch.arange(len(h)).flip(0)])
def test_a_layer_that_sees_the_examples_in_another_order_is_found(order: Between) -> None:
    """Outputs are each example's own; the gradients of that layer are not."""

    def between(model: nn.Module, h: Tensor) -> Tensor:
        chosen = order(h)
        return model.middle(h[chosen])[chosen.argsort()]

    model = Model(between, middle=nn.Linear(WIDTH, WIDTH))
    refused(model, r"layer middle \(Linear\) for one example depends on the others of its batch")


@pytest.mark.parametrize(
    "function",
    [
        lambda losses, y: losses / len(losses),
        lambda losses, y: losses.square() / losses.sum(),
        lambda losses, y: losses * (1 + y) / (1 + y).sum(),  # classes have weights: findings/opacus-weighted-mean.sh
    ],
)
def test_a_loss_that_mixes_is_found(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(InputError, match=r"layer \(the model\) \(Linear\) .* depends on the others"):
        refuse_mixed_examples(nn.Linear(6, CLASSES), lambda out, y: function(loss(out, y), y), vectors(), labels())


def test_statistics_of_a_frozen_layer_are_no_less_shared() -> None:
    """Of a network whose head alone is trained: its running statistics still move with each example."""
    model = nn.Sequential(nn.BatchNorm1d(6).requires_grad_(False), nn.Linear(6, CLASSES))
    refused(model, r"layer 0 \(BatchNorm1d\) shares statistics between the examples of a batch")


def test_statistics_that_a_layer_keeps_are_named_before_what_it_cannot_compute() -> None:
    """As EvoNorm-B0's do, which divide by one less than the numbers of a batch."""

    def between(model: nn.Module, h: Tensor) -> Tensor:
        model.middle.running_var.mul_(0.9).add_(0.1 * h.detach().var(dim=0) * len(h) / (len(h) - 1))
        return h

    middle = nn.Identity()
    middle.register_buffer("running_var", torch.ones(WIDTH))
    refused(Dense(between, middle=middle), r"layer middle \(Identity\) changes middle.running_var while it runs")


def test_a_model_that_needs_company_is_found() -> None:
    def between(model: nn.Module, h: Tensor) -> Tensor:
        if len(h) == 1:
            raise ValueError("more than one, please")
        return h

    refused(Model(between), "Model cannot compute one example alone: .*more than one, please")


@in_one_test(
    ("special", "seen"),
    [
        (lambda x: (x == 0).all(dim=1).sum(), "example 1 of 7 replaced by all zeros"),
        (lambda x: (x == 1).all(dim=1).sum(), "example 1 of 7 replaced by all ones"),
        (lambda x: (x == -1).all(dim=1).sum(), "example 1 of 7 replaced by a blank image"),
        (lambda x: (x > 100).all(dim=1).sum(), "example 1 of 7 replaced by all 10000"),
        (lambda x: x.isnan().all(dim=1).sum(), "example 1 of 7 replaced by all NaN"),
        (lambda x: (x[-1] == -1).all(), "example 7 of 7 replaced by a blank image"),
        (lambda x: (x[0] == x[1]).all(), "example 1 of 7 replaced by a copy of another one"),
        (lambda x: (x[1:] == x[:-1]).all(dim=1).sum() < 6, "example 1 of 7 replaced by another image"),
    ],
)
def test_counting_special_examples_is_found(special: Callable[[Tensor], Tensor], seen: str) -> None:
    class Counting(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.nan_to_num(x)) * (1 + special(x))

    refused(Counting(lambda model, h: h), rf"depends on the others of its batch.*\({seen}\)")


@pytest.mark.parametrize("kind", [Model, Dense])
def test_examples_that_decide_how_many_random_numbers_are_drawn_are_found(kind: type[Model]) -> None:
    def between(model: nn.Module, h: Tensor) -> Tensor:
        if bool(h[0].mean() > 0):
            torch.rand(3)
        return functional.dropout(h, 0.5, model.training)

    refused(kind(between), "depends on the others of its batch: they decide how many random numbers are drawn")


def test_a_parameter_without_elements_is_no_trouble() -> None:
    """As it is of a layer of width 0."""
    accepted(Dense(lambda model, h: h + model.empty.sum(), empty=nn.Parameter(torch.zeros(0, 3))))


class Squared(nn.Module):
    """A layer without a rule that takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(5, 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


def test_as_many_examples_are_tried_as_are_no_size_in_the_model() -> None:
    """With 5 examples its bilinear layer would be computed from each alone, and nothing seen of mixing."""
    model = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 5), Squared(), nn.Flatten(), Model(MIXING["mixup"]))
    model[4].first = nn.Linear(10, WIDTH)
    refused(model, r"example 1 of \d+ .*")


# ---- examples act on later batches ----------------------------------------------------------------------------------


def running_mean(model: nn.Module, h: Tensor) -> Tensor:
    before = model.mean
    model.mean = 0.9 * before + 0.1 * h.detach().mean(dim=0)
    return h - before


def previous_batch(model: nn.Module, h: Tensor) -> Tensor:
    before = model.queue[-1] if model.queue else h.detach()
    model.queue.append(h.detach())
    return 0.7 * h + 0.3 * before if len(before) == len(h) else h


def from_the(number: int) -> Between:
    def between(model: nn.Module, h: Tensor) -> Tensor:
        model.calls += 1
        return mixed(h, torch.arange(len(h)).roll(1)) if model.calls >= number else h

    return between


KEEPING: dict[str, Callable[[], nn.Module]] = {
    "running mean": lambda: Model(running_mean, mean=torch.zeros(WIDTH)),
    "previous batch": lambda: Model(previous_batch, queue=[]),
    "second pass": lambda: Model(from_the(2), calls=0),
    "tenth pass": lambda: Model(from_the(10), calls=0),
    "own generator": lambda: Model(
        lambda model, h: h + torch.randn(h.shape, generator=model.generator), generator=torch.Generator()
    ),
    "no seed": lambda: Model(lambda model, h: h + float(np.random.default_rng().normal())),
    "dense": lambda: Dense(from_the(9), calls=0),
}


@in_one_test("name", KEEPING)
def test_what_is_kept_from_pass_to_pass_is_found(name: str) -> None:
    refused(KEEPING[name](), r"layer .* changes from pass to pass .* keeps something of earlier passes")


@in_one_test("kind", [Model, Dense])
def test_a_hook_that_keeps_the_gradients_of_earlier_examples_is_found(kind: type[Model]) -> None:
    """A hook is no part of what ``copy.deepcopy`` makes of a parameter."""
    model, before = kind(lambda model, h: h), [torch.zeros(())]

    def later(gradient: Tensor) -> Tensor:
        before.append(gradient.detach().clone())
        return gradient + before[-2]

    handle = model.first.weight.register_hook(later)
    refused(model, r"layer first \(Linear\)")
    handle.remove()
    model.first.weight.register_hook(lambda gradient: 2 * gradient)
    accepted(model)
    model.first.weight.requires_grad_(False)  # torch puts no hook on such a parameter, and a copy needs none
    accepted(model)


def test_tensors_that_are_kept_out_of_a_map_over_examples() -> None:
    """torch cannot use them in the next pass, so that training would end with an error of its own."""
    refused(Dense(running_mean, mean=torch.zeros(WIDTH)), "keeps something of earlier passes")


@pytest.mark.parametrize("kind", [Model, Dense])
def test_what_is_kept_of_the_very_first_examples_is_found(kind: type[Model]) -> None:
    """Later passes show nothing of it: they all use the same."""

    def once(model: nn.Module, h: Tensor) -> Tensor:
        if not model.mean:
            model.mean = [float(value) for value in h.detach().mean(dim=0)]
        return h - torch.tensor(model.mean)

    refused(kind(once, mean=[]), "depends on the others of its batch")


# ---- sound models ---------------------------------------------------------------------------------------------------


def few(shape: torch.Size) -> Tensor:
    """Numbers of which a scalar is drawn again until it is small: the same number each time never is."""
    while torch.rand(()) > 0.5:
        pass
    return torch.nn.init.trunc_normal_(torch.empty(shape), a=-0.5, b=0.5)


SOUND: dict[str, Between] = {
    "dropout": lambda model, h: functional.dropout(h, 0.5, model.training),
    "one mask for all": lambda model, h: h * functional.dropout(torch.ones(WIDTH), 0.5, model.training),
    "stochastic depth": lambda model, h: h * (torch.rand(len(h), 1) < 0.5) if model.training else h,
    "layers left out by Python": lambda model, h: 2 * h if model.training and random.random() < 0.5 else h,
    "rrelu": lambda model, h: functional.rrelu(h, training=model.training),
    "rrelu in place": lambda model, h: functional.rrelu(h, training=model.training, inplace=True),
    "noise": lambda model, h: h + torch.randn_like(h) if model.training else h,
    "noise that is drawn until it suits": lambda model, h: h + few(h.shape) if model.training else h,
    "noise by numpy, in evaluation mode too": noise_by_numpy,
}


@pytest.mark.parametrize("name", SOUND)
def test_models_that_draw_random_numbers_are_accepted(name: str) -> None:
    """In training mode, where one image of a batch does change how often torch draws for RReLU on the CPU."""
    accepted(Model(SOUND[name]))


@pytest.mark.parametrize("name", ["dropout", "rrelu"])
def test_models_without_a_rule_that_draw_random_numbers_are_accepted(name: str) -> None:
    accepted(Dense(SOUND[name]))


def test_layers_that_draw_random_numbers_are_accepted() -> None:
    accepted(nn.Sequential(nn.Linear(6, 7), nn.RReLU(), nn.Dropout(0.5), nn.AlphaDropout(0.1), nn.Linear(7, CLASSES)))


def test_a_layer_that_is_used_in_training_alone_is_accepted() -> None:
    """As of variational layers, whose deviation evaluation leaves out."""

    def between(model: nn.Module, h: Tensor) -> Tensor:
        return h + torch.randn_like(h) * model.middle(h).exp() if model.training else h

    accepted(Model(between, middle=nn.Linear(WIDTH, WIDTH)))


@in_one_test("dropout", [0.0, 0.3])
def test_an_example_of_which_rounding_alone_is_left_is_no_mixing(dropout: float) -> None:
    """Its large numbers are no reason to compute, and to draw for, the others in another way."""

    class Dropping(Attention):
        def forward(self, x: Tensor) -> Tensor:
            inner = self.body(x, x, x, need_weights=False)[0]
            return self.head(functional.dropout(inner, dropout, self.training and dropout > 0))

    torch.manual_seed(4)
    model, x, large = Dropping(), torch.randn(EXAMPLES, 3, 4), torch.full((3, 4), 1e4)
    refuse_mixed_examples(model, loss, x, labels(), [large])


@in_one_test("dtype", [torch.float32, torch.float64])
def test_what_a_network_enlarges_of_rounding_is_no_mixing(dtype: torch.dtype) -> None:
    """In float32 the gradient of an example alone is another one by more than a hundredth."""

    class Enlarging(Model):
        def forward(self, x: Tensor) -> Tensor:
            kind = torch.float32 if self.single else x.dtype
            return super().forward((x.to(kind) @ mixing.to(kind)).sin().to(x.dtype))

    mixing, x = 1e4 * torch.randn(300, 6), torch.randn(EXAMPLES, 300, dtype=dtype)
    for single in (True, False):
        refuse_mixed_examples(Enlarging(lambda model, h: h, single=single).to(dtype), loss, x, labels())


@in_one_test("layer", [nn.ReLU(), nn.LayerNorm(WIDTH), nn.GroupNorm(2, WIDTH)])
def test_models_that_draw_nothing_are_accepted(layer: nn.Module) -> None:
    accepted(Model(lambda model, h: model.middle(h), middle=layer))


def test_a_model_that_checks_its_input_is_accepted() -> None:
    def between(model: nn.Module, h: Tensor) -> Tensor:
        if not bool(h.isfinite().all()):
            raise ValueError("not\nfinite")
        return h

    accepted(Model(between))


def test_a_model_that_fails_on_a_blank_image_is_refused() -> None:
    class Fails(Model):
        def forward(self, x: Tensor) -> Tensor:
            if bool((x == -1).all(dim=1).any()):
                raise KeyError("a\nblank")
            return super().forward(x)

    refused(Fails(lambda model, h: h), "a blank image: .*KeyError: 'a.*blank'")


@pytest.mark.parametrize("case", CASES)
def test_the_gradients_of_other_examples_keep_every_bit(case: str) -> None:
    """Which is why a trial needs no tolerance: for all kinds of layers and routes."""
    model, x, y = build(case, 11, torch.float32)
    rows = per_example_gradients(model, loss, x, y).rows(0, 11)
    others = [k for k in range(11) if k != 4]
    for value in (1, -3, torch.nan) if x.is_floating_point() else (0, 3):
        changed = x.clone()
        changed[4] = value
        for name, again in per_example_gradients(model, loss, changed, y).rows(0, 11).items():
            assert torch.equal(rows[name][others], again[others]), (name, value)


# ---- what a trial leaves behind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sound", [True, False])
def test_a_trial_leaves_everything_as_it_was(sound: bool) -> None:
    def between(model: nn.Module, h: Tensor) -> Tensor:
        model.seen.append(len(h))
        return h if sound else previous_batch(model, h)

    model = Model(between, seen=[], queue=[])
    model.last.eval()
    before = copy.deepcopy(model.state_dict())
    states, threads = generator_states(), torch.get_num_threads()
    if sound:
        refuse_mixed_examples(model, loss, vectors(), labels())
    else:
        with pytest.raises(InputError):
            refuse_mixed_examples(model, loss, vectors(), labels())
    assert (model.seen, model.queue) == ([], [])
    assert [module.training for module in (model, model.first, model.last)] == [True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())
    assert generator_states() == states
    assert torch.get_num_threads() == threads


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    refused(Model(lambda model, h: h, lock=threading.Lock()), "Model cannot be copied, .*: TypeError: cannot pickle")


def test_a_model_that_ends_the_process_on_some_data_is_refused() -> None:
    ops = pytest.importorskip("torchvision.ops")
    model = Model(lambda model, h: model.deformed(h[:, :1, None, None], h[:, :2, None, None]).flatten(1).expand_as(h))
    model.deformed = ops.DeformConv2d(1, 1, 1)
    refused(model, "Model calls torchvision's deform_conv2d, which ends the process where an offset is not finite")


def test_a_model_that_seeds_the_global_generator_itself_is_refused() -> None:
    def between(model: nn.Module, h: Tensor) -> Tensor:
        torch.seed()
        return h * torch.rand(1)

    refused(Model(between), "Model sets the seed of a global generator anew in each pass")


def test_it_takes_two() -> None:
    with pytest.raises(ValueError, match="takes two"):
        refuse_mixed_examples(nn.Linear(6, CLASSES), loss, vectors(1), labels(1))


def test_a_copy_that_is_none_is_refused() -> None:
    """It would be tried with gradients of zero, which nothing changes."""
    model = Model(lambda model, h: h)
    model.first.forward = lambda x: functional.linear(x - x.mean(dim=0), model.first.weight)
    refused(model, "a copy of Model uses the parameters of the original")


def test_a_copy_that_trains_the_original_in_its_backward_pass_is_refused() -> None:
    model = Model(lambda model, h: model.run(h))
    middle = nn.Linear(WIDTH, WIDTH)
    model.middle, model.run = middle, lambda h: checkpoint(lambda inner: middle(inner), h, use_reentrant=True)
    refused(model, "a copy of Model uses the parameters of the original")


class MeanOfBatch(torch.autograd.Function):
    """A scale whose gradient is the mean of a batch, and not the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return errors[0] * scale, (errors[0] * x).mean(dim=0)


class WrongInVmap(torch.autograd.Function):
    """A scale whose rule for ``torch.func.vmap`` scales twice."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return errors[0] * scale, (errors[0] * x).sum(dim=0)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, scale: Tensor) -> tuple[Tensor, int]:
        return 2 * x * scale, 0


@in_one_test("function", [MeanOfBatch, WrongInVmap])
@in_one_test("dtype", [torch.float32, torch.float64])
def test_gradients_that_are_not_those_of_training_are_refused(
    function: type[torch.autograd.Function], dtype: torch.dtype
) -> None:
    class Scaled(Model):
        def __init__(self) -> None:
            super().__init__(lambda model, h: function.apply(h, model.factor))
            self.factor = nn.Parameter(torch.ones(WIDTH))

    model = Scaled().to(dtype)
    with pytest.raises(InputError, match=r"layer .*Scaled.* do not add up to that of loss\.backward\(\)") as caught:
        refuse_mixed_examples(model, loss, vectors().to(dtype), labels())
    assert "\n" not in str(caught.value)


def test_a_model_that_takes_float32_only_is_tried_in_it() -> None:
    accepted(Dense(lambda model, h: h.float() @ torch.eye(WIDTH)))
    refused(Dense(lambda model, h: MeanOfBatch.apply(h.float() @ torch.eye(WIDTH), model.scale[:1].float())), "add up")


def test_reentrant_checkpoints_are_accepted() -> None:
    accepted(Model(lambda model, h: checkpoint(model.middle, h, use_reentrant=True), middle=nn.Linear(WIDTH, WIDTH)))


@pytest.mark.parametrize(("between", "most"), [(lambda model, h: h, 36), (SOUND["dropout"], 67)])
def test_a_trial_takes_few_passes(between: Between, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a step on a few examples; more of them where each pass has its own random numbers."""
    calls = []

    def counted(*args: object, **named: object) -> object:
        calls.append(args)
        return per_example_gradients(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(fedpriv.gradients.mixing, "per_example_gradients", counted)
    accepted(Model(between))
    assert len(calls) <= most


# ---- the danger is real ---------------------------------------------------------------------------------------------


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> Tensor:
    """The sum of gradients clipped to length 1, laid end to end."""
    with seeded_generators(seed, CPU):
        gradients = per_example_gradients(model, loss, x, y)
    total = gradients.combine(1 / gradients.norms().clamp(min=1))
    return torch.cat([value.flatten() for value in total.values()])


@pytest.mark.parametrize("mixup", [False, True])
def test_mixup_doubles_what_one_example_can_change(mixup: bool) -> None:
    """Noise for 2 clipping norms, as proven for models that do not mix, is half of what this one needs."""

    class Mixup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, CLASSES, bias=False)
            nn.init.zeros_(self.last.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(mixed(x, torch.randperm(len(x)), 0.5) if mixup and self.training else x)

    model, x, y = Mixup(), torch.zeros(4, 6), torch.zeros(4, dtype=torch.long)
    x[2] = 100.0
    opposite = x.clone()
    opposite[2] = -100.0
    moved = [float((clipped_sum(model, x, y, k) - clipped_sum(model, opposite, y, k)).norm()) for k in range(9)]
    assert max(moved) == pytest.approx(4.0 if mixup else 2.0, rel=1e-5)
    if mixup:
        refused(model, "layer last .* depends on the others of its batch")
    else:
        accepted(model)
