"""What a network costs and allows before any run: ways, exactness, speed, memory, attacks (``fedpriv model``)."""
