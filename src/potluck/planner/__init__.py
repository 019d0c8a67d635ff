"""What work costs on a device and a link, as pure functions."""
