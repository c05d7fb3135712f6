"""Media at the edge: bytes, files and arrays, and the form in which they cross process borders."""
