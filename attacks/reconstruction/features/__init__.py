"""A batch cut into single images by the features that reach the last layer."""
