"""Atomic files, checksum chains, strict JSON and stop signals, independent of training."""
