"""Independent implementations that tests compare the engine with, and a probe that shows the engine's numbers."""
