#!/usr/bin/env bash
# scipy 1.17.1, numpy 2.4.6: in 68 dimensions and above, vonmises_fisher.fit says kappa = 1e-08, whatever the data.
#
# Guess: the maximum likelihood estimate, as in fewer dimensions, or an error.
# Seen: in 65 dimensions kappa = 50 is estimated as 50.3. In 68 dimensions the estimate is 1e-08, the lower end of the
# search, for kappa = 50 and for kappa = 500; a RuntimeWarning speaks of a division. The usual approximation R (d - R^2)
# / (1 - R^2), with R the length of the mean direction, is right within 2 % in all of them.
. "$(dirname "$0")/packages.bash"
packages scipy==1.17.1 numpy==2.4.6
python - <<'END'
import numpy as np
from scipy.stats import vonmises_fisher

for dimensions, fails in ((10, False), (65, False), (68, True), (100, True)):
    for kappa in (50.0, 500.0):
        mean = np.eye(dimensions)[0]
        directions = vonmises_fisher(mean, kappa, seed=np.random.default_rng(0)).rvs(1000)
        _, fitted = vonmises_fisher.fit(directions)
        length = np.linalg.norm(directions.mean(axis=0))
        approximation = length * (dimensions - length**2) / (1 - length**2)
        print(f"{dimensions} dimensions, kappa {kappa:g}: fit {fitted:.4g}, approximation {approximation:.4g}")
        assert abs(approximation / kappa - 1) < 0.02
        assert (fitted < 1e-6) == fails
END
