"""Pure rules: what may be admitted, and how long to wait before another try."""
