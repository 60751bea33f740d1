"""Running a program that somebody sent: it is validated, interpreted with the model, and answered."""
