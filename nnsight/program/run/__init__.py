"""Running programs: checks against a model, a rehearsal on fake tensors, and the interpreter."""
