"""Crash-safe files, checksum chains, JSON and stop signals; knows nothing of training."""
