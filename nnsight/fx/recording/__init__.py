"""Recording: a block runs with lazy tensors, and its torch calls become a program."""
