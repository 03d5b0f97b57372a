#!/usr/bin/env bash
# opacus 1.6.0, torch 2.15.0: a table of positions that is looked up once for the whole batch gets wrong per-sample
# gradients, in the modes "hooks" and "functorch".
#
# Guess: a model that adds position embeddings by broadcasting, as most transformers do, is right or refused.
# Seen: the error against autograd one example at a time is above 0.1; the gradient of the positions has one row for each
# position in place of one for each example, and is added to the examples in that order. Where positions and examples
# differ in number, the shapes differ too, which later code may or may not notice.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2
python -W ignore - <<'END'
import torch
from opacus.grad_sample.utils import wrap_model
from torch import nn

torch.set_default_dtype(torch.float64)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions, self.out = nn.Embedding(11, 5), nn.Embedding(6, 5), nn.Linear(5, 2)

    def forward(self, texts):
        return self.out(torch.tanh(self.tokens(texts) + self.positions(torch.arange(6)))).mean(dim=1)


texts = torch.randint(0, 11, (6, 6), generator=torch.Generator().manual_seed(1))
for mode in ("hooks", "functorch"):
    net = Reader()
    right = [torch.autograd.grad(net(text[None]).sum(), net.positions.weight)[0] for text in texts]
    wrapped = wrap_model(net, grad_sample_mode=mode, loss_reduction="sum")
    wrapped(texts).sum().backward()
    printed = wrapped._module.positions.weight.grad_sample
    error = max((ours - theirs).abs().max().item() for ours, theirs in zip(right, printed))
    print(f"{mode}: shape {tuple(printed.shape)}, error {error:.2f}")
    assert error > 0.1
END
