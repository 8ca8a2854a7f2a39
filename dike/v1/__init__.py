"""TensorFlow 1: graphs and sessions, in jobs and in trials."""
