"""Metrics that are summed over the node's processes, and logs."""
