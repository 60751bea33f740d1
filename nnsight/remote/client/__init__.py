"""The client of a server: submits jobs, waits for them, and binds their results to the user's variables."""
