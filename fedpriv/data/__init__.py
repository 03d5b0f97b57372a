"""Data: data sets, partitions (the examples of each client), and sampling of batches."""
