"""Measurements, each a module that `potluck bench` runs by its name."""
