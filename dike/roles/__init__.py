"""What a process of a training job does; `dike.launch` chooses the role. See docs/roles.md."""
