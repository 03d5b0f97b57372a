"""Private empirical risk minimisation: each client releases one convex model, and the server averages them."""
