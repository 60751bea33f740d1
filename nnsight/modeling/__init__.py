"""Model families: what a root envoy adds to the tree, loading, inputs, and the choice of how to run."""
