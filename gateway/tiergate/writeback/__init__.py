"""Write-back: what the origin is owed, in which order it may see it, and the work of sending it."""
