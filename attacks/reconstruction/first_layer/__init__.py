"""Images read off the gradient of a first layer without a search, with honest or with crafted parameters."""
