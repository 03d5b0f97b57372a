#!/usr/bin/env bash
# torchvision 0.29.2, timm 1.0.31: the first gradient of some untrained networks is zero but for their last layer.
#
# Guess: untrained weights are random, so that the first gradient, from which gradient inversion is usually measured,
# holds something of the input in every layer.
# Seen: torchvision's ViT and timm's Mixer, ResMLP and gMLP start with a head of zeros, and timm's ResNet with zeros in the
# last norm of each residual branch (torchvision's does not). Whatever the input, 98 % or more of the numbers in the first
# gradient are zero; after one step of SGD every layer has a gradient. An attack that finds nothing in the first one shows
# no privacy, and whoever tests per-example gradients on such a network compares zeros.
. "$(dirname "$0")/packages.bash"
packages torch==2.15.0 torchvision==0.29.2 timm==1.0.31
python -W ignore - <<'END'
import timm
import torch
import torchvision
from torch import nn

SMALL = {"img_size": 32, "num_classes": 10}
torch.manual_seed(0)
networks = {
    "torchvision VisionTransformer": torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10),
    "timm mixer_s32_224": timm.create_model("mixer_s32_224", **SMALL),
    "timm resmlp_12_224": timm.create_model("resmlp_12_224", **SMALL),
    "timm gmlp_ti16_224": timm.create_model("gmlp_ti16_224", **SMALL),
    "timm resnet18": timm.create_model("resnet18", num_classes=10),
    "timm vit_tiny_patch16_224": timm.create_model("vit_tiny_patch16_224", **SMALL),
    "torchvision resnet18": torchvision.models.resnet18(num_classes=10),
}
EXPECTED = {name: (0.98, 1.0) for name in list(networks)[:5]} | {name: (0.0, 0.0) for name in list(networks)[5:]}
x, y = torch.rand(4, 3, 32, 32), torch.arange(4)


def zero_share(model):
    """The share of the gradient's numbers that are in parameters whose gradient is zero throughout."""
    model.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(x), y).backward()
    parameters = list(model.parameters())
    return sum(each.numel() for each in parameters if not each.grad.any()) / sum(each.numel() for each in parameters)


for name, model in networks.items():
    first = zero_share(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    second = zero_share(model)
    print(f"{name}: {first:.2%} of the first gradient is zero, {second:.2%} of the second one")
    least, most = EXPECTED[name]
    # A number that the Mixer adds to all channels is undone by its last norm: its gradient is rounding, or 0.
    assert least <= first <= most and second < 1e-6, name
END
