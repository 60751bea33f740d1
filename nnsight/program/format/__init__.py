"""The form of a program: its nodes and operators with their checks, nested values, files, results, and limits."""
