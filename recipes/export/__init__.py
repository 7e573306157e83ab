"""Writes a checkpoint's network to files for other programs, and compares the files with it."""
