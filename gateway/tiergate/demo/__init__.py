"""`tiergate demo`: the product at work on this machine, with a real model and a crash at the worst moment."""

from tiergate.demo.run import EXIT_DIFFERENT, EXIT_INTERRUPTED, DemoError, run

__all__ = ["EXIT_DIFFERENT", "EXIT_INTERRUPTED", "DemoError", "run"]
