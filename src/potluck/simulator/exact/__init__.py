"""Every message and every value: the shipping hosts whole, on small models, under faults from a seed."""
