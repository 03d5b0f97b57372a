#!/usr/bin/env bash
# scikit-image 0.26.0: one pixel just below zero adds 6 dB to the PSNR of a pair of pictures.
#
# Guess: the PSNR of two pictures of floats on [0, 1] hardly changes if one of 1,024 pixels is -0.001 in place of 0.4.
# Seen: 20.66 dB become 26.65 dB. Without data_range the range is that of the type, which for floats is 1 if no pixel of
# the first picture is negative, and else 2; each doubling adds 6.02 dB. A negative pixel in the second picture changes
# nothing. Pictures that were normalised to mean 0, or an original that was interpolated, get the larger figure.
. "$(dirname "$0")/packages.bash"
packages scikit-image==0.26.0 numpy==2.4.6
python -W ignore - <<'END'
import numpy as np
from skimage.metrics import peak_signal_noise_ratio

stream = np.random.default_rng(0)
original = stream.random((32, 32), dtype=np.float32)
other = np.clip(original + 0.1 * stream.normal(size=(32, 32)), 0, 1).astype(np.float32)
below = original.copy()
below[np.unravel_index(abs(original - 0.4).argmin(), original.shape)] = -0.001
plain, moved = peak_signal_noise_ratio(original, other), peak_signal_noise_ratio(below, other)
stated = [peak_signal_noise_ratio(each, other, data_range=1) for each in (original, below)]
print(f"{plain:.2f} dB, with one pixel of -0.001 {moved:.2f} dB; with data_range=1 {stated[0]:.2f} and {stated[1]:.2f}")
assert plain == stated[0] and abs(moved - stated[1] - 20 * np.log10(2)) < 1e-6 and abs(stated[1] - plain) < 0.3
END
