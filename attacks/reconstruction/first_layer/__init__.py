"""Images read off the gradient of a first layer, without a search: also from parameters made for that."""
