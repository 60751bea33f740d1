"""Running a program: it is checked against a model, and interpreted along with it."""
