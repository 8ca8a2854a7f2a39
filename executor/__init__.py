"""The Mesos executor: owns one container (a slot) and runs in it a process of a job, or trials of a search in turns."""
