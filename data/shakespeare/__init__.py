"""The plays of Shakespeare, as in tiny Shakespeare."""
