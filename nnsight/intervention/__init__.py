"""Import paths of the public documentation; each module here only re-exports what lives elsewhere."""
