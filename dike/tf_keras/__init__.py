"""tf_keras `fit` in jobs and in trials."""
