"""A trained model behind an endpoint: what its answers say, what noise on them proves, and who has asked how much."""
