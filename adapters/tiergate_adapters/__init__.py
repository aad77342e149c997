"""What training code uses beside S3: checkpoints at the speed of memory, and a restore that picks the newest whole one.

Import the module of the framework at hand (`tiergate_adapters.dcp`, …); each needs only that framework.
"""
