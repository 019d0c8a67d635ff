"""The real network: gRPC over mutual TLS behind the `Connection` seam."""
