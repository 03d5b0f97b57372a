"""Parts of networks: their settings, shared layers, and how a network is built and tried."""
