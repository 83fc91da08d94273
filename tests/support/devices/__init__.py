"""What checks a device, and the host in a device's place."""
