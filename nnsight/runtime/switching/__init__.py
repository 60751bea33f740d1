"""Model and blocks on one thread: the greenlets of blocks, and the separate torch modes of model and block."""
