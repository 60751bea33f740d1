"""The format of programs: nodes, operators and their checks, nested values, files, results, and limits."""
