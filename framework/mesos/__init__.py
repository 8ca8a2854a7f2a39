"""Talks to a Mesos master: the driver, its events, offers and resources, containers."""
