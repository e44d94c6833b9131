"""ClimbMix, streamed from the Hugging Face Hub."""
