#!/usr/bin/env bash
# torchmetrics 1.9.0, scikit-image 0.26.0: one pair of small pictures has two structural similarities, 0.58 and 0.11.
#
# Guess: SSIM with a Gaussian window of deviation 1.5 on [0, 1] is one number, up to rounding.
# Seen: both use that window, and 11 x 11 pixels of it. torchmetrics (as kornia and ignite do) pads the pictures by
# reflection and averages over windows that hold more border than picture; scikit-image averages over windows that lie
# inside. For the digits 24 and 50, enlarged to 16 x 16 in a frame of 6, one says 0.583 and the other 0.114. On pictures
# of 28 x 28 a reconstruction can lie on either side of the 0.6 that papers call recovered.
. "$(dirname "$0")/packages.bash"
packages torch==2.15.0 torchmetrics==1.9.0 scikit-image==0.26.0 scikit-learn==1.9.0
python -W ignore - <<'END'
import numpy as np
import torch
from skimage.metrics import structural_similarity
from sklearn.datasets import load_digits
from torchmetrics.functional.image import structural_similarity_index_measure

digits = load_digits().images / 16
first, second = (np.pad(np.kron(digits[place], np.ones((2, 2))), 6) for place in (24, 50))
inside = structural_similarity(
    first, second, data_range=1.0, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
)
images = [torch.tensor(picture)[None, None] for picture in (first, second)]
padded = float(structural_similarity_index_measure(*images, data_range=1.0))
print(f"windows inside (scikit-image) {inside:.3f}, padded (torchmetrics) {padded:.3f}")
assert abs(inside - 0.114) < 1e-3
assert abs(padded - 0.583) < 1e-3
END
