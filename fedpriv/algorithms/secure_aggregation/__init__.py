"""Secure aggregation: uploads go out masked, and the server learns their sum only."""
