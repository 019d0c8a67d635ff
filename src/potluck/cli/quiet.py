"""Other libraries' progress bars and warnings, which would be drawn into our own picture."""

from __future__ import annotations


def quiet_libraries() -> None:
    """Errors still show."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
