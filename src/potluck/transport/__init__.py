"""How bytes travel: one seam, in memory over modelled links or over gRPC with mutual TLS, and objects across it."""
