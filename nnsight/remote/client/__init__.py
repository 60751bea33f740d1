"""The client of a server: jobs are submitted, waited for, and their results bound to the variables of the user."""
