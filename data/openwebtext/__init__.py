"""OpenWebText, streamed from the Hugging Face Hub."""
