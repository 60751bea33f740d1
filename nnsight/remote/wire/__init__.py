"""What travels between client and server: nodes, values and results as bytes, the operators that programs may use, and the limits."""
