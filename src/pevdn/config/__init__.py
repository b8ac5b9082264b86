"""What defines a run (settings, algorithms, presets), and how it is computed (runtime options)."""
