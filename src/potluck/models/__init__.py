"""Building, measuring, running and exporting models; devices and precision."""
