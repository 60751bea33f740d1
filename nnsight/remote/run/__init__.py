"""Running a program that a client sent: it is validated and interpreted with the model."""
