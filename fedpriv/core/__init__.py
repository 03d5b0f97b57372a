"""The frame: what an experiment, a run and a result are made of, whichever capabilities there are."""
