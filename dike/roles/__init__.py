"""What processes of a training job have in common, whatever library trains in them. See docs/training-jobs.md."""
