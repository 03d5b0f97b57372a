#!/usr/bin/env bash
# Pillow 13.0.0, torchvision 0.29.2: a grey picture of 16 bits becomes white when it is read as 8 bits or RGB.
#
# Guess: convert("L") and convert("RGB") scale 0..65535 to 0..255, as viewers of pictures show it.
# Seen: whatever is above 255 becomes 255. A ramp from 0 to 65,535 keeps one value in 256 and is white otherwise.
# torchvision's ImageFolder reads with convert("RGB"), so that scans and microscopes' pictures of 16 bits arrive there as
# blank pages, with labels, and train. Nothing warns.
. "$(dirname "$0")/packages.bash"
packages pillow==13.0.0 torchvision==0.29.2 torch==2.15.0 numpy==2.4.6
python -W ignore - <<'END'
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import ImageFolder

ramp = np.linspace(0, 65535, 4096).astype(np.uint16).reshape(64, 64)
Path("pictures/scan").mkdir(parents=True)
Image.fromarray(ramp).save("pictures/scan/ramp.png")
picture = Image.open("pictures/scan/ramp.png")
(read, _), = ImageFolder("pictures")
white = [np.mean(np.asarray(each) == 255) for each in (picture.convert("L"), picture.convert("RGB"), read)]
print(picture.mode, "share of white pixels:", *(f"{share:.3f}" for share in white))
assert picture.mode.startswith("I;16") and min(white) > 0.99
END
