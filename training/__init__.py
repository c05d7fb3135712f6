"""How the demo model is made: synthetic scenes, captions, training, scoring, export. Not part of the package."""
