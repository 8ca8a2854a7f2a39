"""Keras 3: its `fit`, in jobs and in trials. (`dike.keras` is TensorFlow's own.)"""
