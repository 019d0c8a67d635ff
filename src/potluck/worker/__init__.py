"""The worker: gives one device to a run, on its owner's terms."""
