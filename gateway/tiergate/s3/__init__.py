"""The pure S3 codec: requests in, answers out, rules in between; no I/O and no clock."""
