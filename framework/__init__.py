"""The Mesos framework: offers, jobs, failures, the private Mesos and the `dike` command."""
