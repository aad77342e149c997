"""The origin: the real S3 behind the gateway, and the forwarder of what the gateway does not own."""
