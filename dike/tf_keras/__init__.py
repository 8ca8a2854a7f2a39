"""tf_keras: its `fit`, in jobs and in trials."""
