"""Inner and outer optimizers."""
