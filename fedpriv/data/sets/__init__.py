"""The data sets, one file each: its name and public constants, how it is read, counted and fetched."""
