"""A module for each library: its own modules and loaders, on tiny data. `ROWS` are the trainings, by name."""
