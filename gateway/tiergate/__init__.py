"""tiergate: an S3 gateway that keeps training checkpoints in RAM and writes them back to S3."""

__version__ = "0.1.0"
