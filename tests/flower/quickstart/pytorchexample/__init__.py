"""A Flower app in the form of Flower's quickstart for PyTorch, on the digits that scikit-learn brings."""
