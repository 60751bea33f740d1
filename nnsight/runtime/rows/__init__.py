"""The batch axis: several inputs run in one forward pass, and each value is divided into the rows of each input."""
