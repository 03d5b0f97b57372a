"""The core: what any federation needs, whatever its mechanism, algorithm and adversary."""
