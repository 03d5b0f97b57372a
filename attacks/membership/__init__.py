"""Membership inference: signals, attacks on them, scores, and lower bounds on epsilon."""
