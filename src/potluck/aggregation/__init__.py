"""From the updates of many workers to one: each checked whole, then combined by a rule, slice by slice from disk."""
