"""What one runs now and then, as `python -m tools.NAME`."""
