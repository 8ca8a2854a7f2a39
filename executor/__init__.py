"""The Mesos executor: owns one container (a slot) and runs a process of a job in it."""
