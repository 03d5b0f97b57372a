"""The data sets: of each its name and public constants, and how it is read, counted and fetched."""
