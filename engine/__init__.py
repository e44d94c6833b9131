"""What a run needs and a reader may skip: the command line, devices, optimizer, checkpoints, logging, generation."""
