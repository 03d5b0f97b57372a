#!/usr/bin/env bash
# datasets 4.8.5: class_encode_column renumbers labels that are numbers already, and each client's in another way.
#
# Guess: labels 0 to 11 stay 0 to 11; train_test_split(stratify_by_column=...) asks for a column of this type, no more.
# Seen: the values become texts in alphabetical order, so that 10 comes after 1 and is label 2, and 2 is label 4. Clients who
# encode their own rows number the classes that each of them has: 3 is label 0 for one and 2 for another, so that their
# uploads train one output for different classes. cast_column with the names of all classes keeps the numbers.
. "$(dirname "$0")/packages.bash"
packages datasets==4.8.5
HF_DATASETS_DISABLE_PROGRESS_BARS=1 python -W ignore - <<'END'
from datasets import ClassLabel, Dataset


def encoded(labels):
    column = Dataset.from_dict({"label": labels}).class_encode_column("label")
    return dict(zip(labels, column["label"]))


everybody = encoded(list(range(12)))
print(f"labels 0 to 11 become {everybody}")
assert everybody[10] == 2 and everybody[2] == 4 and everybody[1] == 1
clients = [encoded([3, 5, 7]), encoded([1, 3, 11]), encoded([0, 10, 3])]
print(f"three clients: {clients}")
assert [client[3] for client in clients] == [0, 2, 2]
named = Dataset.from_dict({"label": [3, 10]}).cast_column("label", ClassLabel(names=[str(k) for k in range(12)]))
print(f"with all names, 3 and 10 are {list(named['label'])}")
assert list(named["label"]) == [3, 10]
END
