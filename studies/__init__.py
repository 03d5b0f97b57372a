"""What the documentation reports: tables, what attacks recover, trade-offs; each module makes a page or a picture."""
