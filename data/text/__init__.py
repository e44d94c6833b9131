"""Your own text: files, folders, standard input, or ready-made ids."""
