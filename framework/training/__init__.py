"""Training jobs: from a plan and offers to tasks that train, are restarted, grow and shrink."""
