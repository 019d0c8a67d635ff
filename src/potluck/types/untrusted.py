"""Text that came from somebody else's machine."""


def printable(text: str, limit: int) -> str:
    """At most `limit` characters, blanks for what is not printable: it ends up on terminals and in logs."""
    return "".join(c if c.isprintable() else " " for c in text[:limit])
