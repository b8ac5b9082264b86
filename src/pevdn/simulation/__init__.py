"""The runtime that trains a whole team in one compiled program."""
