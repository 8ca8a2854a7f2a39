"""TensorFlow 1: its graphs and sessions, in jobs and in trials."""
