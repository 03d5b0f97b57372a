"""The usual rounds: clients upload gradients (FedSGD) or changes of parameters (FedAvg)."""
