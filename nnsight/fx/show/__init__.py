"""What a user can see of a compiled trace: an explanation, files to read, and the stages of a profile."""
