"""An attack on one gradient or update of your own model."""
