#!/usr/bin/env bash
# safetensors 0.8.0, torch 2.15.0: tensors come back in another order, and weights given by position land in wrong
# layers.
#
# Guess: load_file returns the tensors in the order in which save_file got them, as torch.load does.
# Seen: they are sorted by the width of their type and by name, so that layer 10 comes before layer 2. Apps that pair
# values with names by position, as Flower's NumPyClient does (zip(state_dict.keys(), parameters)), load the weights of
# layer 10 into layer 2, without an error where the shapes are equal.
. "$(dirname "$0")/packages.bash"
packages safetensors==0.8.0 torch==2.15.0 numpy==2.4.6
python - <<'END'
import torch
from safetensors.torch import load_file, save_file
from torch import nn

net = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(12)))
given = net.state_dict()
save_file(given, "net.safetensors")
loaded = load_file("net.safetensors")
print(*loaded)
assert list(loaded) == sorted(given) != list(given)
copy = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(12)))
copy.load_state_dict(dict(zip(copy.state_dict(), loaded.values())), strict=True)
wrong = [place for place in range(12) if not torch.equal(copy[place].weight, net[place].weight)]
print(f"layers with another layer's weights: {wrong}")
assert copy[2].weight.equal(net[10].weight) and len(wrong) == 10
END
