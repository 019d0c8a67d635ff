"""Potluck trains and fine-tunes language models across machines that belong to different people."""

__version__ = "0.1.0"
