"""Client of a Mesos master: driver, events, offers, resources, containers."""
