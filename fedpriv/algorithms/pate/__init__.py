"""PATE (Papernot et al. 2017): clients as teachers vote on public images, and a student learns from the answers."""
