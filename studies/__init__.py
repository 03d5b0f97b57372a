"""What the documentation reports: the paper's tables, what attacks recover, trade-offs; each makes its page or picture."""
