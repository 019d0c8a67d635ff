"""What is kept on disk: objects, parameters, checkpoints, the ledger and the member book."""
