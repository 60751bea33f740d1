"""The format between client and server: nodes, values and results as bytes, the allowed operators, and the limits."""
