"""The Mesos framework: offers, jobs, failures, the embedded Mesos and the `dike` command."""
