"""Recording: a block runs against fakes, and its torch calls become nodes of a program."""
