"""What networks are made with: their settings, and how one is built and tried."""
