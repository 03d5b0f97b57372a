#!/usr/bin/env bash
# xgboost 3.2.0: the thresholds of trees are values of the training data, to the cent.
#
# Guess: a threshold lies between two values, as those of scikit-learn, LightGBM, CatBoost, and of the method "exact".
# Seen: with "hist", the default, and "approx", each of 97 thresholds is the value of a row: ten trees of depth 4 name
# 50 of the incomes and ages of 200 people exactly. In federated XGBoost such trees are what a client uploads.
. "$(dirname "$0")/packages.bash"
packages xgboost==3.2.0 numpy==2.4.6
python -W ignore - <<'END'
import json

import numpy as np
import xgboost

generator = np.random.default_rng(0)
incomes, ages = np.round(generator.lognormal(10, 0.5, 200), 2), generator.uniform(18, 90, 200)
features = np.float32(np.stack([incomes, ages], axis=1))
labels = (incomes > np.median(incomes)) ^ (generator.random(200) < 0.2)
for method, named in (("hist", True), ("approx", True), ("exact", False)):
    settings = {"objective": "binary:logistic", "tree_method": method, "max_depth": 4, "nthread": 1}
    model = xgboost.train(settings, xgboost.DMatrix(features, label=labels), 10)
    trees = json.loads(model.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]
    splits = [
        (feature, np.float32(threshold))
        for tree in trees
        for feature, threshold, left in zip(tree["split_indices"], tree["split_conditions"], tree["left_children"])
        if left != -1
    ]
    exact = [(feature, threshold) for feature, threshold in splits if threshold in features[:, feature]]
    print(f"{method}: {len(exact)} of {len(splits)} thresholds are values of rows, {len(set(exact))} different ones")
    assert len(exact) == (len(splits) if named else 0) and len(splits) > 50
END
