"""Many runs as one study: the sweep file, a record of each trial, the folder that keeps both, and comparisons."""
