"""Values shared by every layer: ids, errors, the device profile, parameter layouts and handles."""
