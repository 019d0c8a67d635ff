"""The real `Fleet`: who is here, what each was given, what came back, and replay after a restart."""
