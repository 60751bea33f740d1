"""Model and block on one thread: the greenlets of blocks, and the modes of torch that each side keeps for itself."""
