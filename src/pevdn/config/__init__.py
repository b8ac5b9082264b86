"""What defines a run: settings, algorithms, presets; and the runtime options that do not."""
