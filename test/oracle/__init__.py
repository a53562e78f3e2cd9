"""Independent implementations that tests compare the engine with. Nothing here imports ``sglang``."""
