#!/usr/bin/env bash
# torchmetrics 1.9.0: the PSNR of a batch is hardly more than that of its worst picture, and not the mean over its pictures.
#
# Guess: peak_signal_noise_ratio(reconstructed, original) of a batch is the mean over its pictures, as papers on gradient
# inversion print it.
# Seen: squared errors are pooled over the whole batch before the logarithm. Of two pictures with 39.9 and 10.0 dB the
# batch has 13.0, where the mean is 25.0; seven perfect pictures beside one of 10 dB have 19.0. dim=(1, 2, 3) gives the mean.
. "$(dirname "$0")/packages.bash"
packages torchmetrics==1.9.0 torch==2.15.0
python -W ignore - <<'END'
import torch
from torchmetrics.functional.image import peak_signal_noise_ratio

generator = torch.Generator().manual_seed(0)
original = torch.rand(2, 3, 32, 32, generator=generator)
noise = torch.randn(2, 3, 32, 32, generator=generator)
reconstructed = original + noise * torch.tensor([0.01, 0.1**0.5])[:, None, None, None]
each = [peak_signal_noise_ratio(reconstructed[[k]], original[[k]], data_range=1.0).item() for k in range(2)]
pooled = peak_signal_noise_ratio(reconstructed, original, data_range=1.0).item()
mean = peak_signal_noise_ratio(reconstructed, original, data_range=1.0, dim=(1, 2, 3)).item()
print(f"pictures: {each[0]:.1f} and {each[1]:.1f} dB; as a batch: {pooled:.1f} dB; their mean: {mean:.1f} dB")
assert pooled < 13.5 and abs(mean - sum(each) / 2) < 0.01 and mean > 24.5
END
