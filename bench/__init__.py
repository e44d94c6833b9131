"""Measurements, each one command: `python -m bench.NAME`. A table for people, then one JSON object for programs."""
