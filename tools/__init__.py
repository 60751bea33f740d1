"""Tools that are run by hand and are not part of the package."""
