"""Text to ids on disk, and ids to batches: tokenizer, shards, loader, and `data/<name>/prepare.py` for each corpus."""
