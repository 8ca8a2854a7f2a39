"""Keras 3 `fit` in jobs and in trials. (`dike.keras` is TensorFlow's own.)"""
