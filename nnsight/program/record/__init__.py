"""Recording: a block runs on fake tensors, and its torch calls become nodes of a program."""
