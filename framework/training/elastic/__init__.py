"""Training jobs that change their size while they train (`dike run --elastic`)."""
