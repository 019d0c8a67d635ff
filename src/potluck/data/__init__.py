"""From files to batches: reading, tokenising, packing, dealing, and what a device reads."""
