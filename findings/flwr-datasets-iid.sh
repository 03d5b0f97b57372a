#!/usr/bin/env bash
# flwr-datasets 0.6.1: IidPartitioner cuts the data in the order in which they lie; sorted data give clients of one class.
#
# Guess: shares that are independent and identically distributed, as the name says.
# Seen: of 100 rows sorted by label, each of ten clients holds one label only. FederatedDataset shuffles before it
# partitions (shuffle=True); a partitioner that is given a data set by itself does not.
. "$(dirname "$0")/packages.bash"
packages flwr-datasets==0.6.1 datasets==4.8.5
python - <<'END'
from datasets import Dataset
from flwr_datasets.partitioner import IidPartitioner

partitioner = IidPartitioner(num_partitions=10)
partitioner.dataset = Dataset.from_dict({"label": [row // 10 for row in range(100)]})
labels = [set(partitioner.load_partition(client)["label"]) for client in range(10)]
print(*(sorted(each) for each in labels))
assert labels == [{client} for client in range(10)]
END
