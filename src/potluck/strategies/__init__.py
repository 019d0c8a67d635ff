"""Training methods, a file each, and the seam they stand on."""
