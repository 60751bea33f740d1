"""Recording for a server: a block runs against fakes, and its torch calls become nodes."""
