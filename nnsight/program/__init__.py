"""Programs: what a block does to a model, as data that can be printed, stored, checked and run."""
