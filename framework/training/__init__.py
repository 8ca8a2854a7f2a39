"""Training jobs: plan, launch, restart and resize."""
