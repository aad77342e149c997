"""Who has which version, in which order things were committed, and what the origin is owed."""
