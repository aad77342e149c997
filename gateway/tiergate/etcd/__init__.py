"""etcd v3 as this product uses it: reads, guarded transactions, leases and watches, over gRPC."""
