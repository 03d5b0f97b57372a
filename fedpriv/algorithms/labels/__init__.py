"""Labels that clients change once, by randomised response, before anything else is done with their data."""
