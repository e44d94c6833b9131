"""FineWeb-Edu, streamed from the Hugging Face Hub."""
