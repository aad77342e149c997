"""Public test kit: real origins to test against, with faults at chosen places."""
