"""The batch axis: several inputs in one forward pass, and which rows of each value belong to which of them."""
