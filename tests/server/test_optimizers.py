"""The steps of fedpriv.core.optimizers against torch.optim's classes, bit for bit."""

import torch

from fedpriv.core.optimizers import make_optimizer
from tests.cases import in_one_test


@in_one_test(("name", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0)])
def test_steps_are_those_of_torch(name: str, momentum: float) -> None:
    generator = torch.Generator().manual_seed(1)
    mine = {key: torch.randn(shape, generator=generator) for key, shape in (("a", (5, 3)), ("b", (4,)), ("c", ()))}
    theirs = [torch.nn.Parameter(value.clone()) for value in mine.values()]
    optimizer = make_optimizer(name, 0.1, momentum)
    reference = torch.optim.Adam(theirs, lr=0.1) if name == "adam" else torch.optim.SGD(theirs, 0.1, momentum)
    for _ in range(5):
        gradients = {key: torch.randn(value.shape, generator=generator) for key, value in mine.items()}
        for parameter, gradient in zip(theirs, gradients.values(), strict=True):
            parameter.grad = gradient.clone()
        # In another order: it is the parameters' that counts.
        optimizer.step(mine, dict(reversed(gradients.items())))
        reference.step()
        assert all(torch.equal(one, other) for one, other in zip(mine.values(), theirs, strict=True))
    for index, state in reference.state_dict()["state"].items():
        kept = {slot: value for slot, value in state.items() if value is not None}
        assert tuple(kept) == optimizer.slots
        assert all(torch.equal(optimizer.memory[slot][index], value) for slot, value in kept.items())
