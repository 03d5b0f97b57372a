#!/usr/bin/env bash
# opacus 1.6.0, torch 2.15.0: behind packed sequences (`pack_padded_sequence(..., enforce_sorted=False)`) DPLSTM, DPGRU
# and DPRNN give the examples of a batch each other's gradients.
#
# Guess: the layers take packed sequences, so `grad_sample` has the batch's order, as for every other layer.
# Seen: it has the order of falling lengths, in which sequences are packed; the layer behind has the batch's. A norm is
# then made of two examples' parts, so one example moves what another one is clipped by. Sums over the batch are right,
# so a comparison with `loss.backward()` shows nothing. Batches that are in that order already are right.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2
python -W ignore - <<'END'
import torch
from opacus import GradSampleModule
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence


class Reader(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = kind(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, texts, lengths):
        state = self.layer(pack_padded_sequence(texts, lengths, batch_first=True, enforce_sorted=False))[1]
        return self.out(state[0][-1] if isinstance(state, tuple) else state[-1])


texts, lengths = torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([6, 2, 4, 1, 3])
order = lengths.argsort(descending=True)
for kind in (DPLSTM, DPGRU, DPRNN):
    plain = Reader(kind)
    singles = [plain(texts[[row]], lengths[[row]]).square().sum() for row in range(5)]
    wrapped = GradSampleModule(Reader(kind), loss_reduction="sum")
    wrapped(texts, lengths).square().sum().backward()
    for name, parameter in wrapped._module.named_parameters():
        own = plain.get_parameter(name)
        right = torch.stack([torch.autograd.grad(each, own, retain_graph=True)[0] for each in singles])
        printed = parameter.grad_sample
        inside = name.startswith("layer.")
        assert torch.allclose(printed.sum(dim=0), right.sum(dim=0), atol=1e-6)
        assert torch.allclose(printed, right[order] if inside else right, atol=1e-6)
        assert torch.allclose(printed, right, atol=1e-3) is not inside
    print(f"{kind.__name__}: the layer's gradients are those of examples {order.tolist()}, the last layer's in order")
END
