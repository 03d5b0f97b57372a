#!/usr/bin/env bash
# peft 0.21.2, torch 2.15.0: an adapter that began with pissa_niter_N fits no base network but the one it was made on.
#
# Guess: an adapter is a small file for a public base network, and whoever loads it there has the model that was saved.
# Seen: PiSSA takes the adapter's first value out of the base's weights. With init_lora_weights="pissa" all do that alike.
# With "pissa_niter_4", the fast form, they are taken by a random algorithm, from torch's global generator: two clients have
# bases that differ, and the same adapter gives them different outputs. So does from_pretrained, of what save_pretrained
# wrote a moment ago, and nothing warns. Outputs here are 0.23 in size and differ by more than 0.1.
. "$(dirname "$0")/packages.bash"
packages peft==0.21.2 torch==2.15.0 transformers==5.24.0
python -W ignore - <<'END'
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out = nn.Linear(64, 64), nn.Linear(64, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))


def adapted(seed, start):
    base = Base()
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=8, target_modules=["hidden"], init_lora_weights=start))


def apart(one, other):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    return float((one(x) - other(x)).abs().max())


for start, alike in (("pissa", True), ("pissa_niter_4", False)):
    first, second = adapted(1, start), adapted(2, start)
    set_peft_model_state_dict(second, get_peft_model_state_dict(first))
    first.save_pretrained("saved")
    torch.manual_seed(3)
    loaded = PeftModel.from_pretrained(Base(), "saved")
    differences = apart(first, second), apart(first, loaded)
    print(f"{start}: another client's output differs by {differences[0]:.3f}, a loaded adapter's by {differences[1]:.3f}")
    assert max(differences) < 1e-5 if alike else min(differences) > 0.1
END
