"""What Dike is compared with: the paper's baselines, tfmesos and Optimus, under the same step-time model."""
