"""The attacks on the finished model and on its answers, one file each."""
