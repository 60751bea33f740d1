"""Recording: a block runs against lazy tensors, and its torch calls become a program."""
