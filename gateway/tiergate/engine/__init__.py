"""S3 operations in terms of tiers: what a request means for memory, the directory and the origin."""
