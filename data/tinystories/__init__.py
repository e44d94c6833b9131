"""TinyStories, streamed from the Hugging Face Hub."""
