"""Run a user's Flower app in simulation, list what leaves its clients, and say what is proven about it."""
