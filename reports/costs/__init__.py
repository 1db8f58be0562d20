"""What one more token costs on the device, and what batches of prefills and decodes cost."""
