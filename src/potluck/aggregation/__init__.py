"""From the updates of many workers to one: checked whole, then summed chunk by chunk."""
