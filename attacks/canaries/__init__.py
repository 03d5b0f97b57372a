"""A lower bound on epsilon from one run whose clients' gradients are canaries."""
