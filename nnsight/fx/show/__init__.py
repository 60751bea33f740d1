"""The parts of a compiled trace that a user can see: explanations, files for debuggers, and the user's line in errors."""
