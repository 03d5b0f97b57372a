"""Which of given records is behind an upload, and how often the best decision is right."""
